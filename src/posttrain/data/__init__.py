"""Records of files and of the Hub: tasks, conversations, text, compared answers, judged steps."""

from posttrain.data.gather import Data, Records
from posttrain.data.load import Conversation, load_conversations, load_tasks
from posttrain.data.rankings import Ranking, load_labelled, load_rankings
from posttrain.data.records import Record, read_hub, read_records
from posttrain.data.steps import SteppedSolution, load_steps

__all__ = [
    "Conversation",
    "Data",
    "Ranking",
    "Record",
    "Records",
    "SteppedSolution",
    "load_conversations",
    "load_labelled",
    "load_rankings",
    "load_steps",
    "load_tasks",
    "read_hub",
    "read_records",
]
