"""Checks for methods of one's own: what every method promises, tried on a synthetic update.

    posttrain.testing.check_method(posttrain.method("grpo", credit=quantile))

`update` and `gradients` are what it is made of: rows of three tasks with holes in their masks, and all that a
learner does with a method. Everything is computed in float64, without a model.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from posttrain.base.usercode import cause
from posttrain.math import masked, reduce
from posttrain.math.choice import takes
from posttrain.methods.build import build, described
from posttrain.methods.table import METHODS, Line, Named, label, like, line
from posttrain.types import PROBE, Batch, Method, Outputs, PerToken, UserError

HORIZON = 16
_OF_THE_MACHINE = re.compile("(time|speed|ranks|samplers)/|seconds|.*memory")


def repeatable(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl without what a clock measured: two runs of one recipe have the same."""
    lines = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [{k: v for k, v in line.items() if not _OF_THE_MACHINE.match(k)} for line in lines]


class Gradients(NamedTuple):
    """Σ weight · loss over a step, and its gradient by each token's log π, entropy, value and divergence."""

    total: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor
    divergence: torch.Tensor


def update(seed: int, spread: float = 0.3, K: int = 4, T: int = 7) -> tuple[Batch, Outputs]:
    """Rows of three tasks, K answers each, and a model's outputs.

    Group numbers are far apart and rows of a group do not lie together; masks have holes, after each of which
    a turn begins, in the same state as other turns at its place; row 0 is full.
    Rows 4 and 9 are probes, which methods without probes cannot tell from the others. `spread` is how far the
    policy has moved from its anchor.
    """
    g = torch.Generator().manual_seed(seed)
    group = torch.tensor([40, -2, 7]).repeat(K)[torch.randperm(3 * K, generator=g)]
    B = len(group)
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[:, 0], mask[:, 1], mask[0, 1:] = False, True, True
    normal = partial(torch.randn, B, T, generator=g, dtype=torch.float64)
    logp = -normal().abs() - 0.1
    version = torch.zeros(B, T, dtype=torch.long)
    version[[4, 9]] = PROBE
    starts = mask & ~mask.roll(1, dims=1)
    batch = Batch(
        tokens=torch.randint(50, (B, T), generator=g),
        mask=mask,
        length=torch.full((B,), T),
        group=group,
        reward=(torch.rand(B, T, generator=g) < 0.4).double() * mask,
        logp_gen=logp + 0.2 * normal(),
        logp_policy=logp,
        version=version,
        logp_old=logp + spread * normal(),
        logp_ref=logp + 0.5 * normal(),
        value=normal(),
        turn_state=torch.where(starts, torch.arange(T), 0),
        greedy=(group % 3 / 4.0).double()[:, None].expand(B, T),
    )
    assert batch.value is not None
    value = batch.value + 0.3 * normal()
    out = Outputs(logp=logp, value=value, entropy=normal().abs(), divergence=normal().abs())
    uniform = torch.rand(B, T, generator=g, dtype=torch.float64)
    return replace(batch, entropy=normal().abs(), uniform=uniform, score_norm=normal().square()), out


def gradients(
    method: Method,
    batch: Batch,
    out: Outputs,
    parts: Sequence[Sequence[int]] | None = None,
    spoil: float | None = None,
) -> Gradients:
    """All that a learner does with a method: prepare the update, weigh the step, cut it into parts, add up.

    spoil: what then stands in the advantages and targets of tokens that are not trained.
    """
    batch = method.prepare(replace(batch, state={**method.start, **batch.state}))
    if spoil is not None:
        made: dict[str, Any] = {"advantage": batch.advantage, "target": batch.target}
        made = {k: torch.where(batch.mask, v, spoil) for k, v in made.items() if v is not None}
        batch = replace(batch, **made)
    weight = method.weight(batch)
    assert out.value is not None
    divergence = torch.zeros_like(out.logp) if out.divergence is None else out.divergence
    leaves = [x.clone().requires_grad_() for x in (out.logp, out.entropy, out.value, divergence)]
    total = torch.zeros((), dtype=out.logp.dtype)
    for part in parts or [list(range(len(batch)))]:
        rows = torch.tensor(part)
        piece = batch.rows(rows)
        loss = method.loss(Outputs(*(x[rows] for x in leaves)), piece)
        summed = reduce.weighted_sum(loss, weight[rows], piece.mask)
        if summed.requires_grad:
            summed.backward()  # type: ignore[no-untyped-call]
        total += summed.detach()
    return Gradients(total, *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves))


def changed(x: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch or outputs with every float column changed."""
    found = {f.name: getattr(x, f.name) for f in fields(x)}
    columns = {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return replace(x, **{k: change(v) for k, v in columns.items()})


@dataclass(frozen=True)
class Report:
    """What check_method found."""

    method: str
    kept: tuple[str, ...]
    """The promises that hold."""
    broken: tuple[tuple[str, str], ...] = ()
    """(promise, what was seen instead) of each that does not."""

    def __str__(self) -> str:
        told = [f"  broken: {promise}: {seen}" for promise, seen in self.broken]
        return "\n".join([f"{self.method} keeps {len(self.kept)} promises", *told])


def check_method(
    method: Named, *, gradient: Callable[..., PerToken] | None = None, seed: int = 0, raises: bool = True
) -> Report:
    """Checks the promises of a method on synthetic updates, without a model, in less than a second.

    It is finite, as is what it watches; no masked token has a gradient, and what stands there changes no bit;
    no split of a step and no order of its rows matters; a step makes answers of reward 1 likelier than those
    of 0, and a critic prefers them; with as many answers to a task as it asks for, it learns.
    gradient(log_ratio, advantage) is the c of its surrogate, ∇loss = -c ∇log π; or gradient(batch, out) the
    ∂L/∂log π of each token of a step, from the batch as `prepare` left it: what autograd must find.

    With `raises` an AssertionError names the first promise that is broken. Raises UserError for an
    object that is not a method, and for a method without a loss.

    >>> print(check_method("grpo"))
    grpo keeps 7 promises
    """
    found, made = line(method), build(method, {}, horizon=HORIZON)
    if not found.has_loss:
        raise UserError("method", f"{_name(method)} has no loss, which these promises are about")
    checks: dict[str, Callable[[Line, Method, int], str]] = {
        "finite": _finite,
        "split invariance": _split,
        "no gradient where nothing is trained": _masked,
        "what is masked changes no bit": _garbage,
        "the order of rows": _order,
        "right answers become likelier": _better,
        "the least group": _least,
    }
    if gradient:
        checks["the gradient that is given"] = lambda line, made, seed: _given(gradient, made, seed)
    seen = {promise: _seen(check, found, made, seed) for promise, check in checks.items()}
    broken = tuple((promise, what) for promise, what in seen.items() if what)
    name = _name(method)
    if broken and raises:
        promise, what = broken[0]
        fails = what if what.startswith("raises ") else f"breaks a promise: {promise}: {what}"
        raise AssertionError(f"{name} {fails} (seed {seed})")
    return Report(name, tuple(promise for promise, what in seen.items() if not what), broken)


def _name(method: Named) -> str:
    """What it is called, as in "grpo with credit = quantile" for a line of the table with another choice."""
    found = line(method)
    if isinstance(method, str) or (usual := METHODS[like(found)]).title != found.title:
        return label(method)
    other = sorted(described(found.method).items() - described(usual.method).items())
    return f"{like(found)}{' with ' * bool(other)}{', '.join(f'{k} = {v}' for k, v in other)}"


def _seen(check: Callable[[Line, Method, int], str], found: Line, made: Method, seed: int) -> str:
    try:
        return check(found, made, seed)
    except Exception as error:
        return f"raises {cause(error)}"


def _finite(found: Line, method: Method, seed: int) -> str:
    batch, out = update(seed)
    # Scores and margins grow while training lasts; a ratio is of one update.
    for scale in (1e5, 1) if method.unit != "token" or "head" in method.needs else (1,):
        got = gradients(method, batch, changed(out, partial(torch.mul, other=scale)))
        if not all(bool(x.isfinite().all()) for x in got):
            return "a loss or gradient is infinite or not a number" + " where scores are large" * (scale > 1)
    if not any(x.any() for x in got[1:]):
        return "no token has a gradient: nothing is learnt"
    ready = method.prepare(replace(batch, state=dict(method.start)))
    watched = {"entropy": out.entropy, **method.watch(out, ready)}
    seen = {name: float(masked.mean(x, batch.mask)) for name, x in watched.items()}
    told = {**dict.fromkeys(method.start, math.nan), **method.update_state(ready, seen), **seen}
    lost = [name for name, number in told.items() if not math.isfinite(number)]
    return f"watch or update_state has no number for {', '.join(lost)}" if lost else ""


def _masked(found: Line, method: Method, seed: int) -> str:
    batch, out = update(seed)
    read = any(bool(x[~batch.mask].any()) for x in gradients(method, batch, out)[1:])
    return "a token that the policy did not choose has one: mask with posttrain.math.masked.fill" * read


def _garbage(found: Line, method: Method, seed: int) -> str:
    batch, out = update(seed)
    runs = []
    for filler in (0.0, math.nan):
        fill = partial(torch.masked_fill, mask=~batch.mask, value=filler)
        bad, said = changed(batch, fill), changed(out, fill)
        runs.append(gradients(method, bad, said, spoil=filler))
    same = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return "" if same else "prompts and padding are read: mask with posttrain.math.masked.fill"


def _split(found: Line, method: Method, seed: int) -> str:
    batch, out = update(seed)
    units = [[i] for i in range(len(batch))]
    if method.unit == "group":
        units = [(batch.group == g).nonzero().flatten().tolist() for g in set(batch.group.tolist())]
    whole, cut = gradients(method, batch, out), gradients(method, batch, out, units)
    fix = "a loss may not divide or look at other rows; prepare and weight may"
    return "" if _close(whole, cut) else f"cut into microbatches a step has another gradient: {fix}"


def _order(found: Line, method: Method, seed: int) -> str:
    batch, out = update(seed)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    straight = gradients(method, batch, out)
    moved = gradients(method, batch.rows(order), changed(out, lambda v: v[order]))
    same = _close(moved, Gradients(straight.total, *(x[order] for x in straight[1:])))
    return "" if same else "in another order rows have other gradients"


def _better(found: Line, method: Method, seed: int) -> str:
    taught = "teacher" in method.asks or found.loop == "offline"
    if taught and found.learns in ("text", "answers", "steps"):
        return ""  # it learns what it is given, or from a teacher, whatever that is worth
    batch, out, right = _judged(seed)
    step = gradients(method, batch, out)
    for of, slope in (("", step.logp), ("the value of ", step.value)):
        up, down = (-float(slope[rows].sum(-1).mean()) for rows in (right, ~right))
        if slope.any() and not up > down:
            return f"a step adds {up:.3g} to {of}a right answer and {down:.3g} to {of}a wrong one"
    return ""


def _least(found: Line, method: Method, seed: int) -> str:
    batch, out, _ = _judged(seed)
    least, B = method.least_group, len(batch)
    if found.loop == "offline" or least > B or "teacher" in method.asks:
        return ""
    # As many answers to a task as it asks for, all of another worth.
    worth = torch.linspace(1, 2, B, dtype=torch.float64)[:, None]
    rows = torch.arange(B - B % least)
    alone = replace(batch, group=torch.arange(B) // least, reward=_last(batch) * worth).rows(rows)
    got = gradients(method, alone, changed(out, lambda v: v[rows]))
    learns = all(bool(x.isfinite().all()) for x in got) and any(x.any() for x in got[1:])
    few = "one answer" if least == 1 else f"{least} answers"
    return "" if learns else f"with {few} to a task it learns nothing: @posttrain.choice(compares='group')"


def _given(gradient: Callable[..., PerToken], method: Method, seed: int) -> str:
    batch, out = update(seed)
    if takes(gradient, "batch"):
        ready = method.prepare(replace(batch, state=dict(method.start)))
        wanted, got = gradient(ready, out), gradients(method, batch, out).logp
    else:
        log_ratio = torch.linspace(-1, 1, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape)
        A, x = out.logp - out.logp.mean(), log_ratio.clone().requires_grad_()
        [slope] = torch.autograd.grad(vars(method)["surrogate"](x, A).sum(), x)
        wanted, got = gradient(log_ratio, A), -slope
    off = float((wanted - got)[batch.mask].abs().max())
    return "" if off < 1e-9 else f"autograd finds another one, by up to {off:.3g}"


def _judged(seed: int) -> tuple[Batch, Outputs, torch.Tensor]:
    """A fresh update in which every other answer to a task is right; and which ones are."""
    batch, out = update(seed)
    right = torch.zeros(len(batch), dtype=torch.bool)
    for g in set(batch.group.tolist()):
        right[(batch.group == g).nonzero().flatten()[::2]] = True
    logp, half = out.logp, torch.full_like(out.logp, 0.5)
    drawn: dict[str, Any] = dict.fromkeys(("logp_gen", "logp_policy", "logp_old", "logp_ref"), logp)
    reward = _last(batch) * right[:, None]
    batch = replace(batch, **drawn, reward=reward, value=half, version=torch.zeros_like(batch.version))
    return batch, replace(out, value=half), right


def _last(batch: Batch) -> torch.Tensor:
    """1 at the last trained token of each row."""
    return ((batch.mask.cumsum(-1) == batch.mask.sum(-1, keepdim=True)) & batch.mask).double()


def _close(a: Gradients, b: Gradients) -> bool:
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in zip(a, b, strict=True))
