"""Records from files and the Hub, as tasks to be answered or conversations to be learnt from."""

from posttrain.data.load import Conversation, Data, load_conversations, load_tasks
from posttrain.data.records import Record, read_hub, read_records

__all__ = ["Conversation", "Data", "Record", "load_conversations", "load_tasks", "read_hub", "read_records"]
