"""Commands of posttrain, one after the other, on every rank: torchrun ... rank_runs.py COMMANDS.json RCS.json

A command is a list of words; words of {"1": [...]} in its place are rank 1's alone.
"""

import gc
import json
import os
import sys
from pathlib import Path

from posttrain import cli

if __name__ == "__main__":
    gc.disable()  # collections take a quarter of the time of imports, and these runs leave little
    commands, codes = json.loads(Path(sys.argv[1]).read_text()), []
    rank = os.environ["RANK"]
    for command in commands:
        words = [w for each in command for w in (each.get(rank, []) if isinstance(each, dict) else [each])]
        codes.append(cli.run(words))
        Path(f"{sys.argv[2]}.{rank}").write_text(json.dumps(codes))
