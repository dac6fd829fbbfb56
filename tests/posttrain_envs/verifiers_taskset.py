"""A taskset as users of the library verifiers write one; nothing here knows of posttrain."""

import verifiers.v1 as vf

__all__ = ["Letters"]


class LettersData(vf.TaskData):
    wanted: int


class Letter(vf.Task[LettersData]):
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        if self.data.wanted < 0:
            raise ValueError("the reward of this task is broken")
        return float(len(trace.last_reply))

    @vf.reward(weight=10.0)
    async def asked(self, trace: vf.Trace) -> float:
        return float(self.data.wanted)


class Letters(vf.Taskset[Letter, vf.TasksetConfig]):
    def load(self):
        return [
            Letter(
                LettersData(idx=n, prompt=f"{n}+{n}=", system_prompt="short", wanted=n if n != 3 else -1),
                self.config.task,
            )
            for n in range(6)
        ]
