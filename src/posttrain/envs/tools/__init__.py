"""Tools that a policy calls over several turns: `ToolUse` plays the episodes, `Tools` names them.

choice.py       the table [task.tools], and what runs each tool
call.py         a tool, a call of it, and what came of that; whether arguments fit a schema
formats.py      how calls are written: read out of a response, and shown
tool_use.py     the environment
template.py     what a chat template shows, and tools in words
conversation.py training data that call tools, as a template is given them
functions.py    functions of the user's: their schemas, and calls in a copy of the process
cells.py        Python and shell, in a box that is made anew for each call; session.py runs in it
mcp.py          tools of MCP servers; mcp_client.py connects to them by the library mcp
search.py       passages of a corpus, by BM25
"""
