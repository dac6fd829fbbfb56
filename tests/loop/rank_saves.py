"""Resume a run on these ranks and save it again at the same update: RECIPE RUN [KEY=VALUE ...]"""

import sys
from pathlib import Path

from posttrain.api.opening import open_session
from posttrain.learner.process_ranks import join_ranks
from posttrain.loop.session import LoopSession
from posttrain.recipe import config


def save_again(recipe: Path, run: Path, *sets: str) -> None:
    loaded = config.read(recipe, sets)
    with join_ranks(loaded.recipe.train) as ranks:
        parts = open_session(loaded, run, title="again", resume=True, ranks=ranks)
        with LoopSession(parts) as session:
            session.save()


if __name__ == "__main__":
    save_again(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
