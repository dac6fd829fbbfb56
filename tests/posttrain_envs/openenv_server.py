"""A server as users of OpenEnv write one: a number to be guessed, which a seed fixes. Run with a port."""

import random
import sys

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **told):
        self.secret, self.tries = random.Random(seed).randint(1, 9), 0
        return Seen(text=f"1 to {told.get('most', 9)}", reward=None, done=False)

    def step(self, action, timeout_s=None, **told):
        self.tries += 1
        if action.message == "break":
            raise RuntimeError("it broke")
        if not action.message.isdigit():
            return Seen(text="no number", reward=-0.1, done=False)
        number = int(action.message)
        if number == self.secret:
            return Seen(text="right", reward=1.0, done=True)
        return Seen(text="higher" if number < self.secret else "lower", reward=0.0, done=False)

    @property
    def state(self):
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_app(Guess, Said, Seen, env_name="guess", max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
