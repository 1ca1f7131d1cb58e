"""Ray Train: `train.py` on two CPU workers.

Workers that die are restarted, and resume from the newest checkpoint.

    python ray_train.py [arguments of train.py]

On a Ray cluster, set the number of workers to one per host; for GPUs, change the two lines with
comments about them. Save checkpoints to a disk that all hosts share, or to a bucket (gs://…,
s3://…).
"""

import os
import socket

import ray.train
import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer


def work(arguments):
    """Train on one worker.

    Ray initializes JAX on GPUs and TPUs; on CPUs the workers agree on an address.
    """
    if not train.jax.distributed.is_initialized():
        with socket.create_server(("", 0)) as free:
            address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
        os.environ["JAX_COORDINATOR_ADDRESS"] = broadcast_from_rank_zero(address)
        os.environ["JAX_NUM_PROCESSES"] = str(ray.train.get_context().get_world_size())
        os.environ["JAX_PROCESS_ID"] = str(ray.train.get_context().get_world_rank())
    train.main(**arguments)


if __name__ == "__main__":
    arguments = train.arguments()
    if "://" not in arguments["checkpoint_dir"]:  # workers do not share this current directory
        arguments["checkpoint_dir"] = os.path.abspath(arguments["checkpoint_dir"])
    # On GPUs: use_gpu=True, resources_per_worker={"GPU": 8}
    scaling = ray.train.ScalingConfig(num_workers=2)
    run = ray.train.RunConfig(
        storage_path=os.path.abspath("runs/ray"),
        failure_config=ray.train.FailureConfig(max_failures=3),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # "cuda"
    )
    JaxTrainer(work, train_loop_config=arguments, scaling_config=scaling, run_config=run).fit()
