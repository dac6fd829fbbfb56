"""Tiny random models of every family, what transformers and plain Python say of them; a stand-in for vLLM."""

import base64
import copy
import io
import itertools
import json
import math
import pickle
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from posttrain.engines.native.draw import stream_key, uniforms
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.engines.vllm import connection, remote
from posttrain.models.experts import expert_layers, stacks
from posttrain.models.file_names import FromFiles
from posttrain.models.loading import quiet
from posttrain.types import Completion, Request, Sampling

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far from the usual 0.02, so that heads look at different places and the next token is not a coin toss.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "smollm": lambda: LlamaConfig(
        **{**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=5,
        layer_types=WINDOWED,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=8, sliding_window=5, layer_types=WINDOWED
    ),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=8, sliding_window=6, tie_word_embeddings=False),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=WINDOWED,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}

_made: dict[tuple[str, torch.dtype, int], PreTrainedModel] = {}


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """This file: models, engines and oracles."""
    return sys.modules[__name__]


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model with transformers' eager attention; the same object for the same arguments."""
    key = (family, dtype, seed)
    if key not in _made:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager")
        # Norms and biases start as ones and zeros, where mistakes in them would not show.
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn(parameter.shape)
            elif "embed" in name:
                parameter.data *= 0.5 if family == "gemma3" else 2
        with quiet():
            model.set_experts_implementation("eager")  # the other kernels know no float64
        _made[key] = model.to(dtype).eval().requires_grad_(False)
    return _made[key]


def spell(tokens: Sequence[int]) -> str:
    """Text in which every token can be told."""
    return "".join(f"<{t}>" for t in tokens)


def build_native_engine(
    model: PreTrainedModel, *, stop_tokens: Sequence[int] = (), context: int = 512, **config: int
):
    """A native engine with a copy of this model."""
    return NativeEngine(
        copy.deepcopy(model),
        decode=spell,
        stop_tokens=stop_tokens,
        config=NativeConfig(**config),
        context=context,
    )


def answers(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    """The engine's answers to these requests, in their order."""
    tickets = [engine.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    while engine.busy:
        ended = dict(engine.poll())
        assert not done.keys() & ended.keys()
        done.update(ended)
    assert sorted(done) == sorted(tickets)
    return [done[t] for t in tickets]


def prompt_of(length: int, seed: int, vocabulary: int = 300) -> tuple[int, ...]:
    """A random prompt."""
    g = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(vocabulary, (length,), generator=g).tolist())


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token, [T, V], by an ordinary forward without a cache."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double()


def filtered(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution to be drawn from, by sorting and counting in float64."""
    p = (logits / (sampling.temperature or 1.0)).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if sampling.top_k:
        order = [i for i in order if p[i] >= p[order[min(sampling.top_k, len(p)) - 1]]]
    if sampling.top_p < 1:
        total, mass, kept = math.fsum(p[i] for i in order), 0.0, []
        for i in order:
            if mass >= sampling.top_p * total:
                break
            mass += p[i]
            kept.append(i)
        order = kept
    order = [i for i in order if p[i] >= sampling.min_p * max(p)]
    total = math.fsum(p[i] for i in order)
    out = np.zeros(len(p))
    out[order] = [p[i] / total for i in order]
    return out


def slow_answer(model: PreTrainedModel, request: Request, claimed: Sequence[int] = ()) -> list[int]:
    """The tokens that a request must give: a whole forward for each, and a search in the running sum.

    One forward over the tokens that an engine claims has the logits of each; one that differs is drawn again
    by a forward over those before it.
    """
    tokens, first = list(request.prompt), len(request.prompt)
    ahead = full_logits(model, [*tokens, *claimed]) if claimed else []
    for n in range(request.sampling.max_new_tokens):
        token = drawn(request, n, ahead[first + n - 1]) if n < len(claimed) else None
        if token is None or tokens[first:] != list(claimed[:n]) or token != claimed[n]:
            token = drawn(request, n, full_logits(model, tokens)[-1])
        tokens.append(token)
    return tokens[first:]


def drawn(request: Request, n: int, logits: torch.Tensor) -> int:
    """The n-th token of an answer, by its logits."""
    if request.sampling.greedy:
        return int(logits.argmax())
    running = filtered(logits, request.sampling).cumsum()
    key = stream_key(request.seed, request.task, request.sample)
    [u] = uniforms([key], [request.position + n]) * running[-1]
    return int(np.searchsorted(running, u, side="right"))


def assert_logps(model: PreTrainedModel, request: Request, answer: Completion, tolerance: float) -> None:
    """Both log-probabilities of every drawn token equal those of an ordinary forward."""
    sampling, n = request.sampling, len(request.prompt)
    logits = full_logits(model, [*request.prompt, *answer.tokens])[n - 1 : -1]
    policy = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    for t, token in enumerate(answer.tokens):
        assert answer.logp_policy[t] == pytest.approx(float(policy[t, token]), abs=tolerance)
        p = 1.0 if sampling.greedy else filtered(logits[t], sampling)[token]
        assert p > 0
        assert answer.logp_gen[t] == pytest.approx(math.log(p), abs=tolerance)


# ---------------------------------------------------------------------- a vLLM server

HANGS, DIES, STOPS = "hangs", "dies", "stops"
"""What a path may do: say nothing, break off before an answer, break off within one."""
INSPECTION = (
    "LlamaForCausalLM()( (embed_tokens): VocabParallelEmbedding(num_embeddings={0}, embedding_dim={1}, "
    "org_vocab_size={0}) (layers): ModuleList()( (0-{3}): {2} x LlamaDecoderLayer()("
)


class StandIn(ThreadingHTTPServer):
    """A server that speaks as vLLM's does, in another thread; `with` starts and ends it.

    It has a model of transformers whose weights it replaces, and draws of its own.
    """

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait on a busy machine; further ones may be lost without an error."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        longest: int = 512,
        raw: bool = False,
        dev: bool = True,
        sleep_mode: bool = True,
        lora: int = 0,
        runtime_lora: bool = True,
        workers: int = 1,
        routed: bool = True,
        insecure: bool = True,
        **info: Any,
    ):
        """lora: the highest rank of an adapter, 0 for none; info: tables of its configuration.

        routed: it says which experts it chose; insecure: it unpickles handles.
        """
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.longest, self.raw, self.dev = model, longest, raw, dev
        self.faults: dict[str, Any] = {}
        """Of a path: what it does, or (status, body), or a list of those, one a call, None for none."""
        self.calls: list[str] = []
        self.order: list[str] = []
        """The calls that change what it holds, and "draw", in order, each with what it asks."""
        self.closed = Counter[str]()
        """Answers that nobody read to their end."""
        self.over = threading.Event()
        self.pause_s = 0.0
        """Between two tokens."""
        self.paused = False
        self.sleep_mode = sleep_mode
        self.asleep: set[str] = set()
        """What has no memory: "weights", "kv_cache"."""
        self.backup: list[torch.Tensor] = []
        """Weights in CPU memory while they have none on the GPU."""
        self.kept: set[str] = set()
        """Weights that it does not replace."""
        self.resets = True
        self.lora, self.runtime_lora, self.info, self.routed = lora, runtime_lora, info, routed
        self.adapters: dict[str, Path] = {}
        """Folder of each adapter that requests may name."""
        self.loaded: dict[str, Any] = {}
        """(scale, tensors) of the last adapter that was read; another one would be read again."""
        self.bytes: list[int] = []
        """Bytes of the tensors of each load."""
        self.workers, self.insecure, self.gpu = workers, insecure, LocalMemory.gpu
        self.members: list[socket.socket] = []
        """Where each worker receives what rank 0 of its group sends."""
        self.received: list[list[tuple[str, torch.Tensor]]] = []
        """The tensors of each update, in order."""
        self.updating = False
        self.prefixes: dict[tuple[str, ...], torch.Tensor] = {}
        """Logits of the prompts that were computed, by adapter and folder too, as vLLM's blocks are."""
        self.turn = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()
        self.leave()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that the other side has closed is no news."""

    def fault(self, path: str) -> Any:
        found = self.faults.get(path)
        return (found.pop(0) if found else None) if isinstance(found, list) else found

    def note(self, what: str) -> None:
        if self.order[-1:] != [what] or what != "draw":
            self.order.append(what)

    def reload(self, place: str) -> None:
        """As vLLM does: every tensor of the folder's files, by the name of its own files; adapters go."""
        files: dict[str, torch.Tensor] = {}
        for file in sorted(Path(place).glob("*.safetensors")):
            files |= load_file(file)
        self.replace(files)

    def replace(self, files: dict[str, torch.Tensor]) -> None:
        """Load tensors by the names of its own files."""
        self.bytes.append(sum(x.nbytes for x in files.values()))
        held = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in FromFiles(self.model, files).items():
            if name not in self.kept:
                held[name].data.copy_(tensor)
        self.loaded.clear()

    def join(self, info: dict[str, Any]) -> None:
        if info.keys() == {"packed"}:  # of IPCWeightTransferInitInfo
            assert info["packed"]
        else:
            self.join_group(info)

    def join_group(self, info: dict[str, Any]) -> None:
        """As NCCLWeightTransferEngine of vLLM's workers, over sockets (see TcpGroup)."""
        assert (info["rank_offset"], info["world_size"]) == (1, 1 + self.workers)
        assert info["packed"]
        self.row_bytes = info["packed_buffer_size_bytes"]
        identity = base64.b64decode(info["nccl_unique_id_b64"], validate=True)
        assert len(identity) == 128
        port = int.from_bytes(identity[:2], "big")
        self.leave()
        self.members = [socket.create_connection(("127.0.0.1", port)) for _ in range(self.workers)]
        for member in self.members:
            member.sendall(b"1")
            assert member.recv(1) == b"1"

    def leave(self) -> None:
        for member in self.members:
            member.close()

    def receive(self, info: dict[str, Any]) -> None:
        if "ipc_handles_pickled" in info:
            self.copy(**info)
        else:
            self.receive_rows(info)

    def copy(
        self,
        *,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        tensor_sizes: list[int],
        ipc_handles_pickled: str,
    ) -> None:
        """As IPCWeightTransferEngine, with LocalMemory: it copies the tensors of a chunk."""
        handles = pickle.loads(base64.b64decode(ipc_handles_pickled, validate=True))
        if self.gpu not in handles:
            raise ValueError(f"IPC handle not found for GPU UUID {self.gpu}. Available UUIDs: {[*handles]}")
        [number] = handles[self.gpu]
        parts = LENT[number][: sum(tensor_sizes)].split(tensor_sizes)
        for name, kind, shape, part in zip(names, dtype_names, shapes, parts, strict=True):
            self.received[-1].append((name, part.clone().view(getattr(torch, kind)).view(shape)))

    def receive_rows(self, info: dict[str, Any]) -> None:
        """As packed_nccl_broadcast_consumer: a row of bytes ends after the tensor that makes it too long."""
        rows: list[list[tuple[str, torch.dtype, list[int]]]] = [[]]
        size = 0
        for name, kind, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            if size > self.row_bytes:
                rows.append([])
                size = 0
            rows[-1].append((name, getattr(torch, kind), shape))
            size += math.prod(shape) * rows[-1][-1][1].itemsize
        for row in rows:
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in row]
            [data] = {self.read(member, sum(sizes)) for member in self.members}
            parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).split(sizes)
            self.received[-1] += [
                (n, part.view(t).view(shape)) for (n, t, shape), part in zip(row, parts, strict=True)
            ]

    def read(self, member: socket.socket, size: int) -> bytes:
        data = member.makefile("rb", buffering=0)
        parts = [b""]
        while (rest := size - sum(map(len, parts))) and (part := data.read(rest)):
            parts.append(part)
        assert not rest, "the sender has ended"
        return b"".join(parts)

    def read_adapter(self, name: str) -> tuple[float, dict[str, torch.Tensor]]:
        """As vLLM's PEFTHelper and LoRAModel do; it has room for one."""
        config = json.loads((self.adapters[name] / "adapter_config.json").read_text())
        tensors = load_file(self.adapters[name] / "adapter_model.safetensors")
        if config["use_dora"]:
            raise ValueError("vLLM does not yet support DoRA.")
        if config["r"] > self.lora:
            raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank {self.lora}.")
        linear = {n for n, m in self.model.named_modules() if isinstance(m, torch.nn.Linear)}
        owners = {n.removeprefix("base_model.model.").partition(".lora_")[0] for n in tensors}
        if unknown := sorted(owners - linear):
            raise ValueError(f"expected target modules in {sorted(linear)} but received {unknown}.")
        over = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
        self.loaded = {name: (config["lora_alpha"] / over, tensors)}
        return self.loaded[name]

    @torch.no_grad()
    def logits(self, tokens: list[int], name: str = "policy") -> torch.Tensor:
        with self.turn, ExitStack() as stack:
            if name in self.adapters:
                scale, tensors = self.loaded.get(name) or self.read_adapter(name)
                for key in (key for key in tensors if "lora_A" in key):
                    module = self.model.get_submodule(key[len("base_model.model.") : -len(".lora_A.weight")])
                    a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
                    hook = module.register_forward_hook(
                        lambda _, x, out, a=a, b=b: out + (x[0] @ a.T @ b.T) * scale
                    )
                    stack.callback(hook.remove)
            return self.model(torch.tensor([tokens])).logits[0].float()

    @torch.no_grad()
    def experts_of(self, tokens: list[int]) -> np.ndarray:
        """[tokens, decoder layers, experts]: layers without experts hold zeros, as vLLM's buffer does."""
        with self.turn:
            found: dict[int, torch.Tensor] = {}
            hooks = [
                experts.register_forward_pre_hook(lambda _, x, n=n: found.__setitem__(n, x[1].clone()))
                for n, experts in enumerate(stacks(self.model))
            ]
            self.model(torch.tensor([tokens]))
            for hook in hooks:
                hook.remove()
        out = np.zeros((len(tokens), self.model.config.num_hidden_layers, found[0].shape[-1]), np.uint8)
        for n, layer in enumerate(expert_layers(self.model)):
            out[:, layer] = found[n].numpy()
        return out

    def prefill(self, tokens: list[int], name: str) -> torch.Tensor:
        """Logits of a prompt, which are not computed again until the prefix cache is reset."""
        key = (name, str(self.adapters.get(name)), *map(str, tokens))
        if key not in self.prefixes:
            self.prefixes[key] = self.logits(tokens, name)
        return self.prefixes[key]


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def answer(self, said: Any, status: int = 200) -> None:
        body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def respond(self) -> None:
        path = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length)) if length else {}
        self.server.calls.append(path)
        fault = self.server.fault(path)
        if fault == HANGS:
            self.server.over.wait()
        if fault in (HANGS, DIES):
            self.close_connection = True
            return
        if isinstance(fault, tuple):
            self.answer(fault[1], fault[0])
            return
        getattr(self, path.strip("/").replace("/", "_"), self.nothing)(asked, fault == STOPS)

    do_GET = do_POST = respond  # noqa: N815

    def nothing(self, *_: Any) -> None:
        self.answer({"detail": "Not Found"}, 404)

    def v1_models(self, *_: Any) -> None:
        adapters = [{"id": name, "max_model_len": None} for name in self.server.adapters]
        self.answer({"data": [{"id": "policy", "max_model_len": self.server.longest}, *adapters]})

    def is_sleeping(self, *_: Any) -> None:
        self.answer({"is_sleeping": bool(self.server.asleep) or self.server.paused})

    def server_info(self, *_: Any) -> None:
        lora = {"max_lora_rank": self.server.lora, "target_modules": None} if self.server.lora else None
        told = {"model_config": {"enable_sleep_mode": self.server.sleep_mode}, "lora_config": lora}
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": self.server.insecure}
        self.answer({"vllm_config": told | self.server.info, "vllm_env": env})

    def v1_load_lora_adapter(self, asked: dict[str, Any], _: bool) -> None:
        server = self.server
        if not (server.lora and server.runtime_lora):
            return self.nothing()
        if self.command == "GET":
            return self.answer({"detail": "Method Not Allowed"}, 405)
        assert "weights" not in server.asleep
        name = asked["lora_name"]
        if name in server.adapters and not asked.get("load_inplace"):
            return self.answer({"error": {"message": f"'{name}' has already been loaded."}}, 400)
        server.adapters[name] = Path(asked["lora_path"])
        try:
            _, tensors = server.read_adapter(name)
        except (ValueError, OSError) as error:
            del server.adapters[name]
            return self.answer({"error": {"message": str(error)}}, 500)
        server.note("adapter")
        server.bytes.append(sum(x.nbytes for x in tensors.values()))
        return self.answer(f"Success: LoRA adapter '{name}' added successfully.")

    def v1_unload_lora_adapter(self, asked: dict[str, Any], _: bool) -> None:
        del self.server.adapters[asked["lora_name"]]
        self.answer(f"Success: LoRA adapter '{asked['lora_name']}' removed successfully.")

    def sleep(self, *_: Any) -> None:
        assert self.path == "/sleep?level=1"
        self.server.note("sleep")
        parameters = [*self.server.model.parameters()]
        self.server.backup = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.data.fill_(float("nan"))
        self.server.asleep, self.server.paused = {"weights", "kv_cache"}, True
        self.server.prefixes.clear()
        self.answer({"status": "sleeping"})

    def wake_up(self, *_: Any) -> None:
        tags = self.path.partition("?tags=")[2]
        self.server.note(f"wake {tags}".strip())
        if "weights" in self.server.asleep and tags in ("", "weights"):
            for parameter, kept in zip(self.server.model.parameters(), self.server.backup, strict=True):
                parameter.data.copy_(kept)
        self.server.asleep -= {tags} if tags else self.server.asleep
        self.server.paused = bool(self.server.asleep)
        self.answer({"status": "sleeping" if self.server.asleep else "awake"})

    def get_world_size(self, *_: Any) -> None:
        self.answer({"world_size": self.server.workers})

    def init_weight_transfer_engine(self, asked: dict[str, Any], _: bool) -> None:
        self.server.note("join")
        self.server.join(asked["init_info"])
        self.answer({"message": "Weight transfer initialized"})

    def shutdown_weight_transfer_engine(self, *_: Any) -> None:
        if self.server.updating:
            return self.answer({"error": {"message": "Cannot release a trainer connection"}}, 500)
        return self.answer({"message": "Weight transfer shut down"})

    def start_weight_update(self, *_: Any) -> None:
        assert self.server.paused
        assert not self.server.updating
        self.server.updating = True
        self.server.received.append([])
        self.answer({"message": "Weight update started"})

    def update_weights(self, asked: dict[str, Any], _: bool) -> None:
        assert self.server.updating
        assert "weights" not in self.server.asleep
        self.server.note("chunk")
        try:
            self.server.receive(asked["update_info"])
        except ValueError as error:
            self.server.updating = False
            return self.answer({"error": {"message": str(error)}}, 500)
        return self.answer({"message": "Weights updated"})

    def finish_weight_update(self, *_: Any) -> None:
        assert self.server.updating
        self.server.note("finish")
        self.server.updating = False
        self.server.replace(dict(self.server.received[-1]))
        self.answer({"message": "Weight update finished"})

    def is_paused(self, *_: Any) -> None:
        self.answer({"is_paused": False}) if self.server.dev else self.nothing()

    def pause(self, *_: Any) -> None:
        self.server.paused = True
        self.answer({"status": "paused"})

    def resume(self, *_: Any) -> None:
        self.server.paused = False
        self.answer({"status": "resumed"})

    def reset_prefix_cache(self, *_: Any) -> None:
        self.server.prefixes.clear()
        self.answer({"success": self.server.resets})

    def collective_rpc(self, asked: dict[str, Any], _: bool) -> None:
        if asked["method"] == "reload_weights":
            assert "weights" not in self.server.asleep
            self.server.note("load")
            self.server.reload(asked["kwargs"]["weights_path"])
            self.answer({"results": [None]})
            return
        assert asked["method"] == "get_model_inspection"
        config = self.server.model.config
        sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_hidden_layers - 1
        self.answer({"results": [INSPECTION.format(*sizes)]})

    def v1_completions(self, asked: dict[str, Any], stops: bool) -> None:
        self.server.note("draw")
        if self.server.paused or self.server.asleep:
            self.answer({"error": {"message": "is paused or asleep"}}, 400)
            return
        if asked["model"] not in ("policy", *self.server.adapters):
            self.answer({"error": {"message": f"The model `{asked['model']}` does not exist."}}, 404)
            return
        prompt, choice = list(asked["prompt"]), dict[str, Any]()
        if "prompt_logprobs" in asked:
            logps = self.server.prefill(prompt, asked["model"]).log_softmax(-1)
            found = [{str(t): {"logprob": float(logps[n, t])}} for n, t in enumerate(prompt[1:])]
            choice["prompt_logprobs"] = [None, *found]
        draws = self.drawn(prompt, asked)
        if not asked.get("stream"):
            tokens, logps = zip(*draws, strict=True)
            choice |= {"token_ids": tokens, "logprobs": {"token_logprobs": logps}, "finish_reason": "length"}
            self.answer({"choices": [choice]})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for token, logp in draws:
                if self.server.over.wait(self.server.pause_s):
                    return
                self.tell({"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [logp]}}]})
                if stops:
                    return
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.closed["answers"] += 1

    def inference_v1_generate(self, asked: dict[str, Any], stops: bool) -> None:
        """As the endpoint for tokens: the last part has the experts of all tokens but the last one."""
        self.server.note("draw")
        prompt, tokens = list(asked["token_ids"]), list(asked["token_ids"])
        draws = list(self.drawn(prompt, asked["sampling_params"] | {"model": asked["model"]}))
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for number, (token, logp) in enumerate(draws, 1):
            tokens.append(token)
            content = [{"token_id": token, "logprob": logp, "rank": None, "top_logprobs": []}]
            choice = {"index": 0, "token_ids": [token], "logprobs": {"content": content}}
            if number == len(draws):
                file = io.BytesIO()
                np.save(file, self.server.experts_of(tokens[:-1]))
                text = base64.b64encode(file.getvalue()).decode() if self.server.routed else None
                choice |= {"finish_reason": "length", "routed_experts": text}
            self.tell({"request_id": "x", "choices": [choice]})
        self.wfile.write(b"data: [DONE]\n\n")

    def tell(self, said: Any) -> None:
        self.wfile.write(f"data: {json.dumps(said)}\n\n".encode())
        self.wfile.flush()
        time.sleep(0)

    def drawn(self, tokens: list[int], asked: dict[str, Any]) -> Any:
        """(token, what is said of how likely it was) one after the other, as vLLM's sampler finds them."""
        dice = torch.Generator().manual_seed(asked.get("seed", 0))
        bias = asked.get("logit_bias", {})
        first, drawn = self.server.prefill(tokens, asked["model"])[-1].clone(), False
        for _ in range(asked["max_tokens"]):
            logits = self.server.logits(tokens, asked["model"])[-1] if drawn else first
            drawn = True
            raw = logits.log_softmax(-1)
            for token, more in bias.items():
                logits[int(token)] += more
            processed = (logits / (asked["temperature"] or 1.0)).log_softmax(-1)
            greedy = asked["temperature"] == 0
            token = int(processed.argmax() if greedy else processed.exp().multinomial(1, generator=dice))
            tokens = [*tokens, token]
            yield token, float((raw if self.server.raw else processed)[token])
            if token in asked.get("stop_token_ids", ()):
                return


class TcpGroup:
    """Sockets in NCCL's place: this process and the workers of a stand-in."""

    device = torch.device("cpu")

    def __init__(self, device: torch.device) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.members: list[socket.socket] = []
        self.identity = self.socket.getsockname()[1].to_bytes(2, "big").ljust(128, b"\xff")
        self.rows: list[int] = []
        """Bytes of each broadcast."""

    @staticmethod
    def obstacle(device: torch.device) -> str:
        return ""

    def join(self, size: int) -> None:
        self.members = [self.socket.accept()[0] for _ in range(size - 1)]
        for member in self.members:
            assert member.recv(1) == b"1"
            member.sendall(b"1")

    def broadcast(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.rows.append(tensor.nbytes)
        for member in self.members:
            member.sendall(tensor.numpy().tobytes())

    def close(self) -> None:
        for one in (self.socket, *self.members):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # ends a call that waits
            one.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TcpGroup]]:
    """The groups that engines make from now on, which are TcpGroups."""
    groups = list[TcpGroup]()

    def make(device: torch.device) -> TcpGroup:
        groups.append(TcpGroup(device))
        return groups[-1]

    monkeypatch.setattr(remote, "NcclGroup", make)
    monkeypatch.setattr(connection, "NcclGroup", TcpGroup)
    yield groups
    for group in groups:
        group.close()


LENT = weakref.WeakValueDictionary[int, torch.Tensor]()
"""What handles open."""
_numbers = itertools.count()


class LocalMemory:
    """Tensors in place of a GPU's memory: a handle opens one while the sender keeps it."""

    device = torch.device("cpu")
    gpu = "6a1f0d3e-learner"

    def __init__(self, device: torch.device) -> None:
        self.sizes: dict[int, int] = {}
        """Bytes of each tensor that was lent, by the number of its handle."""

    @staticmethod
    def obstacle(device: torch.device) -> str:
        return ""

    def empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def handles(self, tensor: torch.Tensor) -> dict[str, tuple[Any, ...]]:
        number = next(_numbers)
        self.sizes[number], LENT[number] = tensor.nbytes, tensor
        return {self.gpu: (number,)}

    def free(self) -> None:
        assert not LENT.keys() & self.sizes.keys()


@pytest.fixture
def over_memory(monkeypatch: pytest.MonkeyPatch) -> list[LocalMemory]:
    """The memories that engines lend from now on, which are of this type."""
    memories = list[LocalMemory]()

    def make(device: torch.device) -> LocalMemory:
        memories.append(LocalMemory(device))
        return memories[-1]

    monkeypatch.setattr(remote, "CudaIpc", make)
    monkeypatch.setattr(connection, "CudaIpc", LocalMemory)
    return memories


@pytest.fixture
def serve(lab) -> Iterator[Callable[..., StandIn]]:
    """serve(raw=..., ...) -> a server over a model of its own, ended with the test."""
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(StandIn(copy.deepcopy(lab.tiny("llama")), **how))


def learns_from_pairs(folder: Path) -> dict[str, Any]:
    """Return the tables of a run of SFT that also answers sums."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text('{"prompt": "1+2=", "answer": "3"}\n' * 4)
    data = {"path": str(pairs)}
    sums = {"name": "sums", "arithmetic": {"low": 2, "high": 9, "held_out": 5, "template": "{a}+{b}="}}
    sums |= {"verifier": {"number": {"where": "last"}}, "max_new_tokens": 3}
    return {
        "method": {"name": "sft", "entropy_bonus": None},
        "task": {"arithmetic": None, "data": data, "held_out": data},
        "verifier": None,
        "sampling": None,
        "rollout": None,
        "batch": {"batch_size": 2},
        "eval": {"task": [sums]},
    }


@pytest.fixture
def fleet(online: dict[str, Any], tiny: Path) -> Iterator[Callable[..., Any]]:
    """fleet(n, ...) -> n servers over the recipe's model, ended with the test, and the recipe of them."""
    with ExitStack() as stack:

        def make(count: int, **how: Any) -> tuple[list[StandIn], dict[str, Any]]:
            models = [AutoModelForCausalLM.from_pretrained(tiny).float().eval() for _ in range(count)]
            servers = [stack.enter_context(StandIn(model, **how)) for model in models]
            urls = [server.url for server in servers]
            tables = online | {
                # Its entropy gives a gradient whatever is answered.
                "method": {"name": "grpo", "entropy_bonus": 0.01},
                "run": {"updates": 2, "threads": 1},
                "checkpoint": {"every": 0},
                "engine": {"name": "vllm", "url": urls if count > 1 else urls[0], "rows": 8},
            }
            tables["engine"]["cache_tokens"] = 512
            return servers, tables

        yield make
