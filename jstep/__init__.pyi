# Public names and their modules, by topic: the single source of truth for __init__.py, type checkers and editors.

# Packages of names.
from jstep import distributed as distributed
from jstep import metrics as metrics
from jstep import summary as summary

# Training state and its global step: those of TensorFlow 1, by its names.
from jstep.state.global_step import create_global_step as create_global_step
from jstep.state.global_step import get_global_step as get_global_step
from jstep.state.global_step import get_or_create_global_step as get_or_create_global_step
from jstep.state.global_step import global_step as global_step
from jstep.state.slots import get_slot as get_slot
from jstep.state.slots import get_slot_names as get_slot_names

# Training state and its global step: the others.
from jstep.state.global_step import increment_global_step as increment_global_step
from jstep.state.interrupted import interrupted_state as interrupted_state
from jstep.state.train_state import TrainState as TrainState

# Training steps: those of TensorFlow 1, by its names.
from jstep.training.apply_gradients import apply_gradients as apply_gradients
from jstep.training.minimize import minimize as minimize

# Training steps: the others.
from jstep.training.looped import scan_steps as scan_steps
from jstep.training.step import TrainStep as TrainStep

# Gradients and clipping: those of TensorFlow 1, by its names.
from jstep.slots.indexed_slices import IndexedSlices as IndexedSlices
from jstep.differentiate.clipping import clip_by_average_norm as clip_by_average_norm
from jstep.differentiate.clipping import clip_by_global_norm as clip_by_global_norm
from jstep.differentiate.clipping import clip_by_norm as clip_by_norm
from jstep.differentiate.clipping import clip_by_value as clip_by_value
from jstep.differentiate.clipping import global_norm as global_norm
from jstep.differentiate.gradients import gradients as gradients
from jstep.differentiate.gradients import stop_gradient as stop_gradient
from jstep.differentiate.loss_gradients import GATE_GRAPH as GATE_GRAPH
from jstep.differentiate.loss_gradients import GATE_NONE as GATE_NONE
from jstep.differentiate.loss_gradients import GATE_OP as GATE_OP
from jstep.differentiate.loss_gradients import compute_gradients as compute_gradients
from jstep.differentiate.microbatches import AggregationMethod as AggregationMethod

# Gradients and clipping: the others.
from jstep.differentiate.clipping import layer_norms as layer_norms
from jstep.differentiate.gradients import map_gradients as map_gradients
from jstep.differentiate.lookup import lookup as lookup

# Optimizers: those of TensorFlow 1, `AdamOptimizer` as `adam`.
from jstep.optimizers.adam import adam as adam
from jstep.optimizers.classic import adadelta as adadelta
from jstep.optimizers.classic import adagrad as adagrad
from jstep.optimizers.classic import ftrl as ftrl
from jstep.optimizers.classic import gradient_descent as gradient_descent
from jstep.optimizers.classic import momentum as momentum
from jstep.optimizers.classic import rmsprop as rmsprop

# Optimizers: the others.
from jstep.optimizers.adam import adabelief as adabelief
from jstep.optimizers.adam import adafactor as adafactor
from jstep.optimizers.adam import adamax as adamax
from jstep.optimizers.adam import adamw as adamw
from jstep.optimizers.adam import adan as adan
from jstep.optimizers.adam import ademamix as ademamix
from jstep.optimizers.adam import adopt as adopt
from jstep.optimizers.adam import nadam as nadam
from jstep.optimizers.adam import radam as radam
from jstep.optimizers.adam import yogi as yogi
from jstep.optimizers.classic import madgrad as madgrad
from jstep.optimizers.classic import sgd as sgd
from jstep.optimizers.layerwise import lamb as lamb
from jstep.optimizers.layerwise import lars as lars
from jstep.optimizers.layerwise import novograd as novograd
from jstep.optimizers.muon import muon as muon
from jstep.optimizers.parameter_free import prodigy as prodigy
from jstep.optimizers.parameter_free import schedule_free_adamw as schedule_free_adamw
from jstep.optimizers.parameter_free import schedule_free_params as schedule_free_params
from jstep.optimizers.parameter_free import schedule_free_sgd as schedule_free_sgd
from jstep.optimizers.sign import lion as lion
from jstep.optimizers.sign import rprop as rprop
from jstep.optimizers.sign import signum as signum
from jstep.optimizers.soap import soap as soap

# Wrappers of optimizers: those of TensorFlow 1, by its names.
from jstep.optimizers.averages import ExponentialMovingAverage as ExponentialMovingAverage

# Wrappers of optimizers: the others.
from jstep.optimizers.averages import averaged_params as averaged_params
from jstep.optimizers.averages import lookahead as lookahead
from jstep.optimizers.averages import slow_params as slow_params
from jstep.optimizers.averages import with_moving_average as with_moving_average
from jstep.optimizers.compact import compact as compact
from jstep.optimizers.compact import repack as repack
from jstep.optimizers.compose import chain as chain
from jstep.optimizers.compose import partition as partition
from jstep.optimizers.compose import scope as scope
from jstep.optimizers.constraints import cautious as cautious
from jstep.optimizers.constraints import with_projection as with_projection
from jstep.optimizers.guards import dynamic_loss_scale as dynamic_loss_scale
from jstep.optimizers.guards import skip_nonfinite as skip_nonfinite
from jstep.optimizers.guards import update_every as update_every
from jstep.optimizers.guards import with_noise_scale as with_noise_scale
from jstep.optimizers.low_precision import master_weights as master_weights
from jstep.optimizers.low_precision import stochastic_rounding as stochastic_rounding
from jstep.optimizers.muon import on_hyperball as on_hyperball

# Elements of a chain.
from jstep.optimizers.adam import scale_by_adam as scale_by_adam
from jstep.optimizers.classic import scale_by_rms as scale_by_rms
from jstep.optimizers.classic import trace as trace
from jstep.optimizers.gradient_transformations import add_noise as add_noise
from jstep.optimizers.gradient_transformations import add_weight_decay as add_weight_decay
from jstep.optimizers.gradient_transformations import centralize_gradients as centralize_gradients
from jstep.optimizers.gradient_transformations import clip_gradients as clip_gradients
from jstep.optimizers.gradient_transformations import decay_weights as decay_weights
from jstep.optimizers.gradient_transformations import normalize_gradients as normalize_gradients
from jstep.optimizers.gradient_transformations import scale as scale
from jstep.optimizers.gradient_transformations import scale_by_learning_rate as scale_by_learning_rate
from jstep.optimizers.gradient_transformations import scale_updates as scale_updates
from jstep.optimizers.layerwise import scale_by_trust_ratio as scale_by_trust_ratio
from jstep.optimizers.muon import normalize_neurons as normalize_neurons
from jstep.optimizers.muon import orthogonalize as orthogonalize
from jstep.optimizers.sign import scale_by_lion as scale_by_lion

# Optimizers of one's own.
from jstep.core.trees import Context as Context
from jstep.core.trees import Optimizer as Optimizer
from jstep.optimizers.compose import stateless as stateless
from jstep.optimizers.from_optax import from_optax as from_optax
from jstep.optimizers.rules import Slot as Slot
from jstep.optimizers.rules import from_direction as from_direction
from jstep.optimizers.rules import leafwise as leafwise
from jstep.optimizers.updates import apply_updates as apply_updates
from jstep.optimizers.updates import map_leaves as map_leaves

# Hyperparameters and schedules: those of TensorFlow 1, by its names.
from jstep.schedules.compose import piecewise_constant as piecewise_constant
from jstep.schedules.curves import cosine_decay as cosine_decay
from jstep.schedules.curves import cosine_decay_restarts as cosine_decay_restarts
from jstep.schedules.curves import exponential_decay as exponential_decay
from jstep.schedules.curves import inverse_time_decay as inverse_time_decay
from jstep.schedules.curves import linear_cosine_decay as linear_cosine_decay
from jstep.schedules.curves import natural_exp_decay as natural_exp_decay
from jstep.schedules.curves import polynomial_decay as polynomial_decay

# Hyperparameters and schedules: the others.
from jstep.core.trees import Schedule as Schedule
from jstep.optimizers.hyperparameters import as_schedule as as_schedule
from jstep.optimizers.hyperparameters import get_hyperparameter as get_hyperparameter
from jstep.optimizers.hyperparameters import held as held
from jstep.optimizers.hyperparameters import set_hyperparameter as set_hyperparameter
from jstep.schedules.compose import constant as constant
from jstep.schedules.compose import join as join
from jstep.schedules.compose import linear_warmup as linear_warmup
from jstep.schedules.compose import shift as shift
from jstep.schedules.compose import times as times
from jstep.schedules.curves import ademamix_alpha as ademamix_alpha
from jstep.schedules.curves import ademamix_beta3 as ademamix_beta3
from jstep.schedules.curves import cyclical as cyclical
from jstep.schedules.curves import inverse_sqrt_decay as inverse_sqrt_decay
from jstep.schedules.curves import linear as linear
from jstep.schedules.curves import one_cycle as one_cycle
from jstep.schedules.curves import warmup_cosine_decay as warmup_cosine_decay
from jstep.schedules.curves import warmup_stable_decay as warmup_stable_decay

# Input data.
from jstep.data.batches import Batches as Batches
from jstep.data.batches import Mixture as Mixture
from jstep.data.batches import batches as batches
from jstep.data.batches import mixture as mixture
from jstep.data.loaders import from_state as from_state
from jstep.data.loaders import replayed as replayed
from jstep.data.prefetch import PrefetchIterator as PrefetchIterator
from jstep.data.prefetch import prefetch_to_device as prefetch_to_device

# Queues and threads: those of TensorFlow 1, by its names.
from jstep.queues.coordinator import Coordinator as Coordinator
from jstep.queues.queue_runner import QueueRunner as QueueRunner
from jstep.queues.queue_runner import add_queue_runner as add_queue_runner
from jstep.queues.queue_runner import start_queue_runners as start_queue_runners
from jstep.queues.queues import CancelledError as CancelledError
from jstep.queues.queues import FIFOQueue as FIFOQueue
from jstep.queues.queues import OutOfRangeError as OutOfRangeError
from jstep.queues.queues import RandomShuffleQueue as RandomShuffleQueue

# The training loop and its hooks: those of TensorFlow 1, by its names.
from jstep.core.logs import log_every_n as log_every_n
from jstep.hooks.at_steps import ProfilerHook as ProfilerHook
from jstep.hooks.at_steps import StopAtStepHook as StopAtStepHook
from jstep.hooks.checkpoint_saver import CheckpointSaverHook as CheckpointSaverHook
from jstep.hooks.report import SummarySaverHook as SummarySaverHook
from jstep.hooks.speed import StepCounterHook as StepCounterHook
from jstep.state.contents import NanLossDuringTrainingError as NanLossDuringTrainingError

# The training loop and its hooks: the others.
from jstep.hooks.at_steps import every as every
from jstep.hooks.bits import AuditError as AuditError
from jstep.hooks.bits import AuditHook as AuditHook
from jstep.hooks.bits import DivergenceError as DivergenceError
from jstep.hooks.bits import FingerprintHook as FingerprintHook
from jstep.hooks.history import History as History
from jstep.hooks.hook import Hook as Hook
from jstep.hooks.nan_loss import NanLossHook as NanLossHook
from jstep.hooks.report import LoggingHook as LoggingHook
from jstep.hooks.report import MetricsHook as MetricsHook
from jstep.hooks.report import ReportingHook as ReportingHook
from jstep.loop.progress import ProgressHook as ProgressHook
from jstep.loop.signals import Preempted as Preempted
from jstep.loop.stalls import StallHook as StallHook
from jstep.loop.train import train as train

# Evaluation.
from jstep.evaluating.callbacks import EarlyStopping as EarlyStopping
from jstep.evaluating.callbacks import KeepBest as KeepBest
from jstep.evaluating.callbacks import ReduceOnPlateau as ReduceOnPlateau
from jstep.evaluating.evaluation_hook import EvaluationHook as EvaluationHook
from jstep.evaluating.evaluator import evaluator as evaluator

# Checkpoints and weights: those of TensorFlow 1, by its names.
from jstep.checkpoint.names import checkpoints_iterator as checkpoints_iterator
from jstep.checkpoint.names import latest_checkpoint as latest_checkpoint
from jstep.checkpoint.saver import Saver as Saver

# Checkpoints and weights: the others.
from jstep.checkpoint.manifest import CheckpointError as CheckpointError
from jstep.checkpoint.merge import merge_checkpoints as merge_checkpoints
from jstep.checkpoint.names import checkpoint_name as checkpoint_name
from jstep.weights.load import load_weights as load_weights
from jstep.weights.save import save_weights as save_weights

# Several devices and processes.
from jstep.data.placement import shard_batch as shard_batch
from jstep.optimizers.carry import carry as carry
from jstep.state.sharding import fsdp_specs as fsdp_specs
from jstep.state.train_state import shard_state as shard_state
from jstep.tools.topologies import topology as topology

# Debugging, planning, transfer to wider models.
from jstep.state.fingerprints import fingerprint as fingerprint
from jstep.tools.collectives import Collective as Collective
from jstep.tools.cost import Cost as Cost
from jstep.tools.cost import cost as cost
from jstep.tools.find_nonfinite import NonFinite as NonFinite
from jstep.tools.find_nonfinite import find_nonfinite as find_nonfinite
from jstep.tools.goodput import Goodput as Goodput
from jstep.tools.goodput import goodput as goodput
from jstep.tools.plan import Plan as Plan
from jstep.tools.plan import plan as plan
from jstep.tools.replay import Replay as Replay
from jstep.tools.replay import ResumeReport as ResumeReport
from jstep.tools.replay import replay as replay
from jstep.tools.replay import verify_resume as verify_resume
from jstep.tools.report import Report as Report
from jstep.tools.report import report as report
from jstep.tools.runs import RunList as RunList
from jstep.tools.runs import RunSummary as RunSummary
from jstep.tools.runs import runs as runs
from jstep.tools.transfer import CoordCheck as CoordCheck
from jstep.tools.transfer import MupFactors as MupFactors
from jstep.tools.transfer import coord_check as coord_check
from jstep.tools.transfer import mup as mup

__version__: str
__all__: list[str]
