"""Turn records of a data set into rows that an offline method trains on, in groups.

answers    a conversation is a row; the assistant's turns are trained
rankings   a question is a group, each of its answers a row; the reward is its score
labels     an answer is a row, and its label the reward
steps      an answer is a row with a marked position, and a label, after each step

A method that reads a head has marked positions instead of trained tokens: its row ends in one more token,
which is never fed, so the state "before" it is that of the last real token (learner/pack.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, overload

from posttrain.base.chat import Chat
from posttrain.data import Ranking, SteppedSolution
from posttrain.data.corpus import Corpus, Text, load_corpus
from posttrain.data.gather import summary
from posttrain.data.messages import answer_messages
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.training_conversations import ConversationFormat, telling
from posttrain.plan.model_info import ModelInfo, Say
from posttrain.plan.resolve import Resolved
from posttrain.types import PROBE, Message, Trajectory, UserError

Group = tuple[Trajectory, ...]
UNREAD = 0
"""The token after the end of a row that a head reads. It is never fed, so any id serves."""


@dataclass(frozen=True)
class Shaper:
    """Turn records into groups of rows of at most `bound` tokens; count rows that were cut or left out."""

    chat: Chat
    bound: int
    marks: bool
    """True if a head is read at the end of each answer, instead of the answer's tokens being trained."""
    separator: str = "\n\n"
    tool_format: FormatName = "auto"
    """Format in which the calls of a conversation are written."""
    train_on: Literal["all", "last"] = "all"
    """Which turns of a conversation are trained."""

    @cached_property
    def telling(self) -> ConversationFormat:
        """The form in which calls and tools are shown."""
        return telling(self.chat, self.tool_format)

    def groups(
        self, records: Sequence[Any], learns: str, say: Say, bad: Literal["error", "skip"] = "error"
    ) -> list[Group]:
        """Return the groups of all records (see `each`)."""
        return [group for _, group in self.each(records, learns, say, bad)]

    def each(
        self, records: Sequence[Any], learns: str, say: Say, bad: Literal["error", "skip"] = "error"
    ) -> list[tuple[Any, Group]]:
        """Return each usable record with its group.

        A row longer than the bound is cut there, or left out if a head reads its end or if no trained token
        remains. A record that the chat template refuses raises UserError, or is left out and counted if bad
        is "skip". Raises UserError if no record remains.
        """
        make: dict[str, Callable[[Any, Counter[str]], Group]] = {
            "answers": self._conversation,
            "rankings": self._ranking,
            "labels": self._ranking,
            "steps": self._steps,
        }
        if learns == "steps":
            try:
                self.chat.between(self.separator)
            except UserError as error:
                raise UserError("batch.separator", error.problem, "give another one") from None
        counts: Counter[str] = Counter()
        pairs: list[tuple[Any, Group]] = []
        faults: list[UserError] = []
        for record in records:
            try:
                pairs.append((record, make[learns](record, counts)))
            except UserError as error:
                faults.append(error.at(record.source))
                if bad == "error":
                    raise faults[0] from None
        if faults and not pairs:
            problem = f"none of {len(records)} {_NAMES[learns]} can be used; the first: {faults[0].problem}"
            raise UserError(faults[0].key, problem, faults[0].fix)
        if faults:
            say(f"{len(faults)} of {len(records)} {_NAMES[learns]} skipped: {summary(faults)}")
        useful = [(record, group) for record, group in pairs if group]
        for problem, number in counts.items():
            say(f"{number} of {len(records)} {_NAMES[learns]} {problem.format(bound=self.bound)}")
        if pairs and not useful and len(pairs) == counts[_UNTRAINED]:
            problem = f"none of {len(pairs)} conversations has a message that is to be trained"
            raise UserError(pairs[0][0].source, problem, "leave weight or train out of one of them")
        if pairs and not useful:
            raise UserError(
                "batch.max_length",
                f"all {len(pairs)} {_NAMES[learns]} were filtered out: none has a trained token within "
                f"{self.bound} tokens",
                "raise it",
            )
        return useful

    def _conversation(self, record: Any, counts: Counter[str]) -> Group:
        messages, tools = record.messages, getattr(record, "tools", ())
        earlier = _count_earlier(messages) if self.train_on == "last" else 0
        if tools or _has_calls(record):
            messages, tools = self.telling.told(messages, tools)
        tokens, trained = self.chat.render_supervised(messages, tools, earlier=earlier)
        if not any(trained):
            counts[_UNTRAINED] += 1
            return ()
        if any(trained[self.bound :]):
            counts["are longer than {bound} tokens and were cut there"] += 1
        tokens, trained = tokens[: self.bound], trained[: self.bound]
        if not any(trained):
            counts["had nothing left to train on and are left out"] += 1
            return ()
        reward: Any = getattr(record, "reward", None)
        # Methods that read rewards have already refused values that are not numbers; others ignore them.
        if not isinstance(reward, (int, float)) or isinstance(reward, bool):
            reward = 0.0
        return (row(tokens, trained, reward),)

    def _ranking(self, record: Ranking, counts: Counter[str]) -> Group:
        if self.marks:
            return self._ranking_for_head(record, counts)
        sides = self.chat.render_answers(*self._messages_of(record))
        if any(any(trained[self.bound :]) for _, trained in sides):
            counts["are longer than {bound} tokens and were cut there"] += 1
        cut = [(tokens[: self.bound], trained[: self.bound]) for tokens, trained in sides]
        if not all(any(trained) for _, trained in cut):
            counts["had an answer with nothing left to train on and are left out"] += 1
            return ()
        if len({tuple(tokens) for tokens, _ in cut}) < len(cut):
            counts["have answers that no longer differ once they are cut and are left out"] += 1
            return ()
        return tuple(row(*side, score) for side, score in zip(cut, record.scores, strict=True))

    def _ranking_for_head(self, record: Ranking, counts: Counter[str]) -> Group:
        """Render the answers as a verifier sees them."""
        prompt, answers, tools = self._messages_of(record)
        sides = []
        for *earlier, last in answers:
            if keys := [key for key in ("tool_calls", "reasoning_content") if key in last]:
                problem = f"the last message of an answer has {keys[0]}, and a reward model reads text alone"
                raise UserError("", problem, "write it into content, or leave such records out")
            sides += self.chat.render_for_judge([*prompt, *earlier], [last["content"]], tools)
        if any(len(tokens) > self.bound for tokens in sides):
            counts["have an answer that ends beyond {bound} tokens and are left out"] += 1
            return ()
        return tuple(marked(t, {len(t): s}) for t, s in zip(sides, record.scores, strict=True))

    def _messages_of(
        self, record: Ranking
    ) -> tuple[tuple[Message, ...], list[tuple[Message, ...]], tuple[Mapping[str, Any], ...]]:
        """Return the prompt, the messages of each answer and the tools, as the template receives them."""
        answers = [answer_messages(answer) for answer in record.answers]
        if not (record.tools or _has_calls(record)):
            return record.messages, answers, ()
        pairs = [self.telling.told((*record.messages, *answer), record.tools) for answer in answers]
        # Messages are added and merged, but each assistant message stays one.
        before = sum(message["role"] == "assistant" for message in record.messages)
        starts = [[n for n, m in enumerate(turns) if m["role"] == "assistant"][before] for turns, _ in pairs]
        (first, tools), start = pairs[0], starts[0]
        return first[:start], [turns[at:] for (turns, _), at in zip(pairs, starts, strict=True)], tools

    def _steps(self, record: SteppedSolution, counts: Counter[str]) -> Group:
        # A separator within a step splits it for a verifier too; the label belongs to its end.
        parts = [[part for part in step.split(self.separator) if part.strip()] for step in record.steps]
        tokens, ends = self.chat.render_steps(
            record.messages, [part for step in parts for part in step], self.separator
        )
        ends = [0, *ends]
        last_parts = accumulate(len(step) for step in parts)
        labels = {
            ends[part]: label
            for part, label in zip(last_parts, record.labels, strict=True)
            if label is not None
        }
        if len(tokens) > self.bound:
            counts["are longer than {bound} tokens and lose the steps beyond"] += 1
        labels = {at: label for at, label in labels.items() if 0 < at <= self.bound}
        if not labels:
            counts["have no labelled step within {bound} tokens and are left out"] += 1
            return ()
        return (marked(tokens[: max(labels)], labels),)


def _has_calls(record: Any) -> bool:
    answers = [answer_messages(answer) for answer in getattr(record, "answers", ())]
    return any("tool_calls" in message for turns in (record.messages, *answers) for message in turns)


def _count_earlier(messages: Sequence[Message]) -> int:
    """Return the number of the assistant's messages before the last message of a user."""
    roles = [message["role"] for message in messages]
    return roles[: len(roles) - roles[::-1].index("user")].count("assistant") if "user" in roles else 0


_UNTRAINED = "have no message that is to be trained and are left out"
_NAMES = {"answers": "conversations", "rankings": "rankings", "labels": "answers", "steps": "answers"}


def row(tokens: list[int], trained: list[bool], reward: float) -> Trajectory:
    """Return a row from data, not sampled, with its reward at the last trained token."""
    rewards = [0.0] * len(tokens)
    rewards[len(trained) - 1 - trained[::-1].index(True)] = float(reward)
    return Trajectory.given(tokens, trained=trained, reward=rewards)


def marked(tokens: list[int], labels: dict[int, float]) -> Trajectory:
    """Return a row whose head is read before each of these positions; the labels are its targets.

    >>> r = marked([7, 8, 9], {3: 1.0})
    >>> r.tokens, r.sampled, r.reward
    ([7, 8, 9, 0], [False, False, False, True], [0.0, 0.0, 0.0, 1.0])
    """
    places = range(len(tokens) + 1)
    trained, reward = [t in labels for t in places], [labels.get(t, 0.0) for t in places]
    return Trajectory.given([*tokens, UNREAD], trained=trained, reward=reward)


def with_probes(groups: Sequence[Group], bound: int) -> list[Group]:
    """Append probes to the groups: each row's prompt with an answer to another prompt, which is not trained.

    An answer to the same prompt would not be a mismatch. So rows are ordered by prompt, and answers shifted
    by the most rows of any prompt: each answer is used once, unless over half of the rows share a prompt.
    A probe ends with its answer, or at `bound` tokens. A batch with a single prompt has no probes.
    """
    by_prompt: dict[tuple[int, ...], list[Trajectory]] = {}
    for row in (row for group in groups for row in group):
        by_prompt.setdefault(_prompt(row), []).append(row)
    pairs = [(prompt, row) for prompt, rows in by_prompt.items() for row in rows]
    shift = max(map(len, by_prompt.values()), default=0)
    probes: list[Group] = []
    for place, (prompt, _) in enumerate(pairs):
        later = (pairs[(place + shift + n) % len(pairs)] for n in range(len(pairs)))
        answer = next((row for other, row in later if other != prompt), None)
        if answer is None:
            continue
        start = answer.prompt_length
        tokens = [*prompt, *answer.tokens[start:]][:bound]
        trained = [*(False for _ in prompt), *answer.sampled[start:]][:bound]
        probes.append((Trajectory.given(tokens, trained=trained, version=[PROBE] * len(tokens)),))
    return [*groups, *probes]


def _prompt(row: Trajectory) -> tuple[int, ...]:
    return tuple(row.tokens[: row.prompt_length])


def _longest_probe(groups: Sequence[Group], bound: int) -> int:
    """Return the tokens of the longest probe of these groups; raise UserError if they have one prompt."""
    rows = [row for group in groups for row in group]
    if len(set(map(_prompt, rows))) < 2:
        raise UserError(
            "task.data",
            "the KL is measured on answers to other prompts, and all records have the same prompt",
            "give records of two prompts or more",
        )
    prompts = (row.prompt_length for row in rows)
    answers = (len(row.tokens) - row.prompt_length for row in rows)
    return min(bound, max(prompts) + max(answers))


def row_bound(resolved: Resolved, policy: ModelInfo) -> int:
    """Return the most tokens of a row."""
    return min(resolved.recipe.batch.max_length or policy.context, policy.context)


class Singles(Sequence[Group]):
    """A sequence of rows in which each row is a group, made on access."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Group: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Group]: ...
    def __getitem__(self, i: int | slice) -> Group | Sequence[Group]:
        return Singles(self.rows[i]) if isinstance(i, slice) else (self.rows[i],)


def numbered(groups: Iterable[Group]) -> tuple[list[Trajectory], list[int]]:
    """Return the rows of the groups, and the number of the group of each."""
    pairs = [(row, number) for number, group in enumerate(groups) for row in group]
    return [row for row, _ in pairs], [number for _, number in pairs]


def build_mixed_groups(
    resolved: Resolved, policy: ModelInfo, say: Say
) -> tuple[Sequence[Group], Sequence[Group], int, list[tuple[int, int]]]:
    """Return the groups of all sources of an offline method, as `build_groups`, and how many each has."""
    train: list[Group] = []
    held_out: list[Group] = []
    sizes, longest = [], 0
    if not resolved.sources:
        groups, held_out_groups, longest = build_groups(resolved, policy, say)
        return groups, held_out_groups, longest, [(len(groups), len(held_out_groups))]
    for part in resolved.parts:
        groups, held_out_groups, most = build_groups(part, policy, say)
        teacher = resolved.recipe.teacher_of(part.recipe.source)
        train += _with_teacher(groups, teacher)
        held_out += _with_teacher(held_out_groups, teacher)
        sizes.append((len(groups), len(held_out_groups)))
        longest = max(longest, most)
    return train, held_out, longest, sizes


def _with_teacher(groups: Sequence[Group], number: int) -> Sequence[Group]:
    """Return groups whose rows are compared with the reference of this number."""
    return [tuple(replace(row, teacher=number) for row in group) for group in groups] if number else groups


def build_groups(
    resolved: Resolved, policy: ModelInfo, say: Say
) -> tuple[Sequence[Group], Sequence[Group], int]:
    """Return the training and held-out groups of an offline method, and the tokens of the longest."""
    batch, learns, bound = resolved.recipe.batch, resolved.line.learns, row_bound(resolved, policy)
    if learns == "text":
        train, *held_out = (
            _load_corpus(text, policy, bound, say) for text in (*resolved.train, *resolved.held_out)
        )
        return Singles(train), Singles(held_out[0]) if held_out else [], train.longest
    marks = "head" in resolved.method.needs
    shaper = Shaper(policy.chat, bound, marks, batch.separator, batch.tool_format, batch.train_on)
    if any(getattr(record, "tools", ()) or _has_calls(record) for record in resolved.train):
        say(f"conversations call tools: {shaper.telling}")
    task = resolved.recipe.source
    groups = shaper.groups(resolved.train, learns, say, task.data.bad if task.data else "error")
    longest = max((sum(len(row.tokens) for row in group) for group in groups), default=0)
    if resolved.method.probes and groups:
        longest = max(longest, _longest_probe(groups, bound))
    bad = task.held_out.bad if task.held_out else "error"
    return groups, shaper.groups(resolved.held_out, learns, say, bad), longest


def _load_corpus(text: Text, policy: ModelInfo, bound: int, say: Say) -> Corpus:
    eos = policy.tokenizer.eos_token_id
    if eos is None:
        raise UserError("model.path", "the tokenizer has no end token, which parts documents")
    return load_corpus(text, encode=policy.chat.spell, eos=eos, max_length=bound, say=say)


def bytes_of(groups: Sequence[Group], limit: int) -> float:
    """Return the bytes of the text that the first rows predict; 0 if the rows are not text."""
    corpus = groups.rows if isinstance(groups, Singles) else None
    return corpus.utf8_bytes(range(min(limit, len(corpus)))) if isinstance(corpus, Corpus) else 0.0
