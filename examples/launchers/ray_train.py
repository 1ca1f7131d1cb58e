"""Ray Train: `train.py` on two CPU workers. Workers that die are started again, and resume from the last checkpoint.

    python ray_train.py [arguments of train.py]

On a Ray cluster change the number of workers, one for each host, and on GPUs the two lines that say so. Checkpoints
then belong on a disk that all hosts see, or in a bucket (gs://…, s3://…).
"""

import os
import socket

import ray.train
import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer


def work(arguments):
    """What each worker does. Ray initializes JAX on GPUs and TPUs; on CPUs the workers agree on an address."""
    if not train.jax.distributed.is_initialized():
        with socket.create_server(("", 0)) as free:
            address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
        os.environ["JAX_COORDINATOR_ADDRESS"] = broadcast_from_rank_zero(address)
        os.environ["JAX_NUM_PROCESSES"] = str(ray.train.get_context().get_world_size())
        os.environ["JAX_PROCESS_ID"] = str(ray.train.get_context().get_world_rank())
    train.main(**arguments)


if __name__ == "__main__":
    arguments = train.arguments()
    if "://" not in arguments["checkpoint_dir"]:  # workers have another current directory
        arguments["checkpoint_dir"] = os.path.abspath(arguments["checkpoint_dir"])
    scaling = ray.train.ScalingConfig(num_workers=2)  # use_gpu=True, resources_per_worker={"GPU": 8}
    run = ray.train.RunConfig(
        storage_path=os.path.abspath("runs/ray"),
        failure_config=ray.train.FailureConfig(max_failures=3),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # "cuda"
    )
    JaxTrainer(work, train_loop_config=arguments, scaling_config=scaling, run_config=run).fit()
