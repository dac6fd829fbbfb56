"""Tools that a policy calls over several turns: `ToolUse` plays the episodes, `Tools` names them.

settings.py         the table [task.tools], and what runs each tool
call.py             a tool, a call and its result; whether arguments fit a schema
formats.py          how calls are written: parsed from a response, and shown
tool_use.py         the environment
template_support.py what a chat template shows, and tools described in words
training_conversations.py  training data that call tools, in the form that a template takes
functions.py        functions of the user: their schemas, and calls in a copy of the process
cells.py            Python and shell, in a fresh sandbox for each call; cell_runner.py runs in it
mcp.py              tools of MCP servers; mcp_client.py connects to them by the library mcp
search.py           passages of a corpus, by BM25
"""
