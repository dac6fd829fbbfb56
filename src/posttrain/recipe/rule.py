"""A rule of what a recipe cannot combine, and what its predicate can see of the recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from posttrain.base.kinds import by_class, kinds
from posttrain.base.usercode import MEMORY
from posttrain.envs.protocol import Env
from posttrain.errors import Option, UnreadKeyError, UserError, spell_key
from posttrain.methods import build
from posttrain.methods.table import Line, label
from posttrain.recipe.document import has
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.tasks import TaskChoice
from posttrain.search.choice import SearchChoice
from posttrain.types import Method
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True)
class Context:
    """What the predicate of a rule can see."""

    recipe: Recipe
    line: Line
    """The method's entry in the table of methods."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """The keys that the user set; needed for rules of unread keys."""
    built: Method | None = None
    """The run's method; None while the recipe is read."""
    verifier: Verifier | None = None
    env: Env | None = None
    ranks: int = 1
    """Number of ranks that train together."""
    sources: Sequence[TaskChoice] = ()
    """All sources of tasks; `recipe` has the one called `task`."""

    @property
    def task(self) -> TaskChoice:
        """Return the source of tasks of `recipe`."""
        return self.recipe.source

    @property
    def mixes(self) -> bool:
        """Return whether the recipe has several sources of tasks."""
        return len(self.sources) > 1

    @property
    def online(self) -> bool:
        """Return whether the method samples from the policy."""
        return self.line.loop == "online"

    @property
    def name(self) -> str:
        """Return the name of the method as messages write it."""
        return label(self.recipe.method["name"])

    @cached_property
    def method(self) -> Method:
        """Return the run's method, or build one with the same options. Raises UserError if that fails."""
        options = dict(self.recipe.method)
        return self.built or build.method(options.pop("name"), **options).method

    @property
    def beyond_parts(self) -> str:
        """Return the keys that make a reward more than the sum of the scores that the credit compares.

        It is empty if the credit compares whole rewards, or if a single verifier counts.
        """
        verifier, tools = self.recipe.verifier, self.task.tools
        if not build.credits_parts(self.method):
            return ""
        weights = [verifier.weights.get(part.name, 1.0) for part in verifier.build_parts()]
        if len(weights) - weights.count(0) < 2:
            return ""
        usual = {"kl_in_reward": 0.0, "overlong_buffer": 0.0, "running_scale": 0.0, "reward_weight": 1.0}
        keys = [f"method.{key}" for key, value in usual.items() if getattr(self.method, key, value) != value]
        keys += ["verifier.combine"] * (verifier.combine != "sum")
        keys += [f"verifier.{key}" for key in ("length", "normalise", "clip") if getattr(verifier, key)]
        keys += ["task.tools.call_reward"] * bool(tools and tools.call_reward)
        return ", ".join([*keys, *["search"] * bool(self.recipe.search)])

    @property
    def lacks_greedy(self) -> str:
        """Return what gives no greedy answer to a task, if the credit compares with one; else ""."""
        if not getattr(self.method, "asks_greedy", False):
            return ""
        grouped = self.verifier is not None and self.verifier.grouped
        lacks = {"an agent": self.task.agent, "a search": self.recipe.search, "a verifier of groups": grouped}
        return next((name for name, present in lacks.items() if present), "")

    @property
    def search(self) -> SearchChoice:
        """Return the table [search], or its defaults."""
        return self.recipe.search or SearchChoice()

    @property
    def moves(self) -> Any:
        """Return the registered moves of a search under the verifier's kind, or None if it has none."""
        kind = by_class("verifiers").get(type(self.verifier))
        return kinds("moves")[kind].load() if kind and kind in kinds("moves") else None

    @property
    def sampler_device(self) -> tuple[str, str]:
        """Return the key that names the first sampler's device, with its value."""
        devices = self.recipe.async_.devices
        return ("async.devices", devices[0]) if devices else ("model.device", self.recipe.model.device)

    @property
    def servers(self) -> int:
        """Return how many servers engine.url names."""
        return len(self.recipe.engine.urls)

    @property
    def samplers(self) -> int:
        """Return the number of samplers of all ranks together."""
        return sum(len(self.recipe.samplers_of(rank)) for rank in range(self.ranks))

    @property
    def update_size(self) -> tuple[str, int]:
        """Return the key that sets how many groups or rows an update has, with its value."""
        if self.online:
            return "rollout.groups", self.recipe.rollout.groups
        return "batch.batch_size", self.recipe.batch.batch_size

    def needs(self, *columns: str) -> bool:
        """Return whether the method needs one of these columns of a batch; True if that cannot be known.

        It cannot be known of a method that a Python program passed as an object ("memory:" in the run's
        file), nor of one that cannot be built: `build` raises the error for it later.
        """
        name = self.recipe.method["name"]
        if isinstance(name, str) and name.startswith(MEMORY):
            return True
        try:
            return not self.method.needs.isdisjoint(columns)
        except UserError:
            return True

    @property
    def reads_reference(self) -> bool:
        """Whether the method compares with a reference policy; True if that cannot be known."""
        return self.needs("logp_ref") or self.compares_tables

    @property
    def compares_tables(self) -> bool:
        """Whether the method compares whole distributions with a reference; True if that cannot be known."""
        name = self.recipe.method["name"]
        if isinstance(name, str) and name.startswith(MEMORY):
            return True
        try:
            return self.method.compare is not None
        except UserError:
            return True


Predicate = Callable[[Context], object]
"""Returns a true value for a recipe that breaks the rule."""


@dataclass(frozen=True)
class Rule:
    """A combination that is refused, or, with `unread`, a key that nothing reads under the other settings."""

    key: str
    """The key or table that the error names."""
    condition: str
    """`when` in words, for docs/recipes.md."""
    when: Predicate
    problem: str
    """What is wrong. In braces, as for `str.format`: tables of the recipe, `name` and `line` of the method,
    `table` (this key in brackets), `ranks`, `size` of an update, `device` of samplers, numbers of `samplers`
    and `servers`, `c` (the context)."""
    fix: str | Option = ""
    """What the user can do; a template, too."""
    unread: bool = False
    """Whether the rule applies only if the user set the key; it is then checked without building anything."""

    def breaks(self, c: Context) -> bool:
        return (not self.unread or has(c.tables, self.key.split("."))) and bool(self.when(c))

    def error(self, c: Context) -> UserError:
        """Return the error for a recipe that breaks this rule."""
        values = vars(c.recipe) | {
            "c": c,
            "name": c.name,
            "line": c.line,
            "table": spell_key(f"[{self.key}]"),
        }
        values |= {"ranks": c.ranks, "size": c.update_size[1], "device": c.sampler_device[1]}
        values |= {"servers": c.servers, "samplers": c.samplers}
        kind = UnreadKeyError if self.unread else UserError
        return kind(self.key, self.problem.format(**values), str(self.fix).format(**values))
