"""One episode with tools before there is a policy: a scripted one calls a tool, then answers."""

from posttrain.envs.protocol import Start, Turn, guarded_reply, suited
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.runtime.ask import Asked
from posttrain.runtime.policy import Policy
from posttrain.runtime.prompts import called
from posttrain.types import UserError
from posttrain.verifiers.workers.workers import Workers


def transcript(asked: Asked, policy: Policy) -> list[tuple[str, bool]]:
    """The first task's episode as the model would see it: pieces of text, and whether a run trains on them.

    Nothing where the recipe has no tools; UserError where a call cannot be made on this machine.
    """
    env, chat, limits = suited(asked.env, policy.chat), policy.chat, asked.recipe.rollout
    if not isinstance(env, ToolUse):
        return []
    task, judge = asked.train[0], asked.recipe.verifier.build()
    golds = judge.golds(task) if judge else []
    start: Start = env.start(task)
    tokens, state = chat.render(start.messages, start.tools), start.state
    shown = [("".join(chat.pieces(tokens)), False)]
    with Workers(1, deadline_s=limits.deadline_s + env.reply_s, memory_mb=limits.memory_mb) as workers:
        for said in (env.example(), next(iter(golds), task.answer or "")):
            answer = [*chat.spell(said), chat.end()]
            turn = called(workers, guarded_reply, env, state, said)
            verdict = turn.verdict if isinstance(turn, Turn) else None
            if not isinstance(turn, Turn) or (verdict and verdict.failed):
                fault = verdict or turn
                what = f"a call of the first tool fails: {fault.label}: {fault.reason}"
                raise UserError(what, where="task.tools")
            shown.append(("".join(chat.pieces(answer)), True))
            tokens += answer
            if verdict:
                return [*shown, (f"\n{verdict.label}: {verdict.reason}", False)]
            added, state = chat.extend(tokens, turn.messages), turn.state
            tokens += added
            shown.append(("".join(chat.pieces(added)), False))
    return shown
