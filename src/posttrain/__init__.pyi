from posttrain.api.recipe import Recipe as Recipe
from posttrain.api.run import Run as Run
from posttrain.api.run import load as load
from posttrain.api.session import Session as Session
from posttrain.api.session import evaluate as evaluate
from posttrain.api.session import train as train
from posttrain.batch import Batch as Batch
from posttrain.batch import Method as Method
from posttrain.batch import Outputs as Outputs
from posttrain.data.protocol import Games as Games
from posttrain.data.protocol import Tasks as Tasks
from posttrain.engines.native.engine import NativeEngine as NativeEngine
from posttrain.envs.protocol import Env as Env
from posttrain.envs.protocol import Start as Start
from posttrain.envs.protocol import Turn as Turn
from posttrain.errors import RunError as RunError
from posttrain.errors import UserError as UserError
from posttrain.learner.learner import Learner as Learner
from posttrain.learner.learner import Losses as Losses
from posttrain.learner.learner import Update as Update
from posttrain.loop.loop import Callback as Callback
from posttrain.math.choice import AtLeast as AtLeast
from posttrain.math.choice import Between as Between
from posttrain.math.choice import choice as choice
from posttrain.methods.build import method as method
from posttrain.methods.table import Line as Line
from posttrain.rollout.rollouts import Rollouts as Rollouts
from posttrain.run.tables import Groups as Groups
from posttrain.run.tables import Metrics as Metrics
from posttrain.types import Episode as Episode
from posttrain.types import Sampling as Sampling
from posttrain.types import Task as Task
from posttrain.types import Trajectory as Trajectory
from posttrain.types import Verdict as Verdict
from posttrain.verifiers.protocol import Verifier as Verifier

from . import testing as testing

__version__: str
__all__ = [
    "AtLeast",
    "Batch",
    "Between",
    "Callback",
    "Env",
    "Episode",
    "Games",
    "Groups",
    "Learner",
    "Line",
    "Losses",
    "Method",
    "Metrics",
    "NativeEngine",
    "Outputs",
    "Recipe",
    "Rollouts",
    "Run",
    "RunError",
    "Sampling",
    "Session",
    "Start",
    "Task",
    "Tasks",
    "Trajectory",
    "Turn",
    "Update",
    "UserError",
    "Verdict",
    "Verifier",
    "choice",
    "evaluate",
    "load",
    "method",
    "train",
]
