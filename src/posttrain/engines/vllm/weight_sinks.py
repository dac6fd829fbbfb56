"""Ways of giving weights to a vLLM server.

    WeightFiles    all weights as files of the model's names, which the server loads in place of its own
    NcclWeights    the same tensors under the same names, from GPU to GPU
    IpcWeights     the same tensors under the same names, on the GPU that both sides share
    AdapterFiles   a low-rank adapter as peft's files; the weights that it changes are sent once, as files

The endpoints are those of vLLM 0.32, whose source was read.
"""

import os
import pickle
import queue
import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors.torch import save_file

from posttrain.base.usercode import cause
from posttrain.engines.protocol import PeftAdapter
from posttrain.engines.vllm.asking import ExpectedWeights
from posttrain.engines.vllm.connection import MODELS, NO_ADAPTERS, NO_TRANSFER
from posttrain.engines.vllm.ipc import LentMemory
from posttrain.engines.vllm.nccl import BroadcastGroup
from posttrain.engines.vllm.server import CONNECT_S, VllmServer
from posttrain.models.fingerprint import NamedTensors, checked, combined, digest, fingerprint
from posttrain.models.tensor_files import LazyTensors
from posttrain.types import RunError

Carrier = TypeVar("Carrier", bound=BroadcastGroup | LentMemory)
_FILE_BYTES = 1 << 30
"""Bytes of weights that are gathered in one file."""
_CHUNK_BYTES = 1 << 28
"""Bytes of weights that are sent at once; both sides need room for them two or three times."""
_PREFIX = "posttrain-version-"
"""Begins the name of each adapter on a server."""
_FINISH, _LEAVE = "/finish_weight_update", "/shutdown_weight_transfer_engine"
_JOIN, _UPDATE = "/init_weight_transfer_engine", "/update_weights"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_PEFT = "base_model.model."


class WeightSink(Protocol):
    """One way of giving weights to a server."""

    @property
    def name(self) -> str:
        """Name by which requests ask for what was sent last."""
        ...

    def send(self, weights: NamedTensors, pause: Callable[[], None]) -> str:
        """Return the digest of the weights that the server has read, once it computes with them.

        Where it cannot say what it has read, the digest of what was sent. Call `pause` once before the server
        changes anything; it draws until then, as while files are written.
        Raise KeyError for an unknown, repeated or missing weight, ValueError for a wrong shape, and RunError
        if the server does not load them.
        """
        ...


class WeightFiles:
    """Send all weights through files, which the server has read when it answers.

    name: of the server's model. folder: visible to the server; "" for that of temporary files.
    """

    def __init__(
        self, server: VllmServer, name: str, expected: ExpectedWeights, dtype: torch.dtype, folder: str
    ) -> None:
        self.server, self.name, self.expected, self.dtype = server, name, expected, dtype
        self.folder = os.path.expanduser(folder) or None

    def send(self, weights: NamedTensors, pause: Callable[[], None]) -> str:
        with tempfile.TemporaryDirectory(prefix="posttrain-weights-", dir=self.folder) as place:
            files = self._write(weights, Path(place))
            pause()
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": place}}
            self.server.ask("/collective_rpc", arguments)
            return combined(self.expected.fingerprints(LazyTensors(*files)))

    def _write(self, weights: NamedTensors, place: Path) -> list[Path]:
        """Write these weights to files, under all their names, and return the paths."""
        files, size = list[Path](), 0
        tensors: dict[str, torch.Tensor] = {}
        pointers = set[int]()

        def write() -> None:
            files.append(place / f"model-{len(files):05d}.safetensors")
            save_file(tensors, str(files[-1]), metadata={"format": "pt"})
            tensors.clear()
            pointers.clear()

        here = ((name, value.cpu()) for name, value in checked(weights, self.expected.shapes, self.dtype))
        for name, value in self.expected.to_files(here):
            plain = value.contiguous()
            tensors[name] = plain.clone() if plain.data_ptr() in pointers else plain  # of tied weights
            pointers.add(plain.data_ptr())
            size += plain.nbytes
            if size >= _FILE_BYTES:
                write()
                size = 0
        if tensors:
            write()
        return files


class ChunkedWeights(ABC, Generic[Carrier]):
    """Send all weights from a GPU, in chunks, each with a request that names its tensors.

    name: of the server's model. carrier: what brings the bytes of a chunk there.

    The digest is that of the tensors that were sent: vLLM 0.32 reports none of what its workers received, and
    stores it in an order of its own. What has arrived is verified by the canary alone.
    """

    def __init__(
        self,
        server: VllmServer,
        name: str,
        expected: ExpectedWeights,
        dtype: torch.dtype,
        carrier: Carrier,
    ) -> None:
        self.server, self.name, self.expected, self.dtype = server, name, expected, dtype
        self.carrier: Carrier = carrier
        self._has_joined = False

    def send(self, weights: NamedTensors, pause: Callable[[], None]) -> str:
        prints = list[str]()

        def here() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in checked(weights, self.expected.shapes, self.dtype, self.carrier.device):
                prints.append(fingerprint(name, value))
                yield name, value

        pause()
        if not self._has_joined:
            self._leave()
            self._join()
            self._has_joined = True
        self.server.ask("/start_weight_update")
        try:
            self._send_chunks(self.expected.to_files(here()))
        except (KeyError, ValueError):  # these are not its weights; the next ones replace all
            self.server.ask(_FINISH)
            raise
        self.server.ask(_FINISH)
        return combined(prints)

    def _send_chunks(self, weights: NamedTensors) -> None:
        chunk, size = dict[str, torch.Tensor](), 0
        for name, value in weights:
            chunk[name] = value
            size += value.nbytes
            if size >= _CHUNK_BYTES:
                self._send_chunk(chunk)
                chunk, size = {}, 0
        if chunk:
            self._send_chunk(chunk)

    def _leave(self) -> None:
        """End the connection of a run that has ended, with the server's workers."""
        try:
            self.server.ask(_LEAVE)
        except RunError:  # that run ended between two chunks; the next weights replace those of both
            self.server.ask(_FINISH)
            self.server.ask(_LEAVE)

    def _send_chunk(self, chunk: dict[str, torch.Tensor]) -> None:
        """Send these tensors as one row of bytes, which vLLM cuts by their shapes.

        It views the bytes where they lie, which needs tensors of one dtype.
        """
        info = {
            "names": list(chunk),
            "dtype_names": [str(value.dtype).removeprefix("torch.") for value in chunk.values()],
            "shapes": [list(value.shape) for value in chunk.values()],
        }
        parts = [value.contiguous().view(-1).view(torch.uint8) for value in chunk.values()]
        self._hand_over(info, parts)

    @abstractmethod
    def _join(self) -> None:
        """Prepare the server's workers for chunks, once."""

    @abstractmethod
    def _hand_over(self, info: dict[str, Any], parts: list[torch.Tensor]) -> None:
        """Return once the server has the bytes of a chunk's tensors; info: their names, types and shapes."""


class NcclWeights(ChunkedWeights[BroadcastGroup]):
    """Send all weights by NCCL, in a group that is not joined yet.

    A broadcast cannot be interrupted. So it runs in a thread, like the request that the server answers after
    it, and a thread that waits for a lost server is left until the process ends.
    """

    def _join(self) -> None:
        answer = self.server.ask("/get_world_size", method="GET")
        with self.server.expecting("does not say how many workers it has"):
            size = 1 + int(answer["world_size"])
        info = {
            "nccl_unique_id_b64": b64encode(self.carrier.identity).decode(),
            "rank_offset": 1,
            "world_size": size,
            "packed": True,
            "packed_buffer_size_bytes": _CHUNK_BYTES,
        }
        self._do_both(_JOIN, {"init_info": info}, partial(self.carrier.join, size))

    def _hand_over(self, info: dict[str, Any], parts: list[torch.Tensor]) -> None:
        """Broadcast a row, after more than _CHUNK_BYTES of which vLLM expects the next one.

        So at most the last tensor may exceed them.
        """
        row = torch.cat(parts)
        _wait_for(row)
        self._do_both(_UPDATE, {"update_info": info}, partial(self.carrier.broadcast, row))

    def _do_both(self, path: str, body: dict[str, Any], ours: Callable[[], None]) -> None:
        """Send a request that the server answers once it and `ours` have met; raise RunError if one fails."""
        ends = queue.SimpleQueue[Exception | None]()

        def run(part: Callable[[], object]) -> None:
            try:
                part()
                ends.put(None)
            except Exception as error:
                ends.put(error)

        for part in (partial(self.server.ask, path, body), ours):
            threading.Thread(target=run, args=(part,), daemon=True).start()
        until = time.monotonic() + self.server.deadline_s + CONNECT_S
        for _ in range(2):
            try:
                error = ends.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                seconds = self.server.deadline_s
                raise self.server.fault(
                    f"does not take weights within {seconds:g} s; {NO_TRANSFER}"
                ) from None
            if isinstance(error, RunError):
                raise error
            if error:
                raise self.server.fault(f"cannot be reached by NCCL: {cause(error)}; {NO_TRANSFER}") from None


class IpcWeights(ChunkedWeights[LentMemory]):
    """Lend all weights to a server's only worker, which is on the same GPU, one chunk after the other.

    The worker has copied a chunk when the server answers: vLLM 0.32 copies packed chunks, and waits for its
    GPU. So all chunks of a sync lie in the same memory, which is freed with the last one.
    """

    _row, _handles = torch.empty(0), ""

    def send(self, weights: NamedTensors, pause: Callable[[], None]) -> str:
        try:
            return super().send(weights, pause)
        finally:
            self._row = torch.empty(0)
            self.carrier.free()

    def _join(self) -> None:
        self.server.ask(_JOIN, {"init_info": {"packed": True}})

    def _hand_over(self, info: dict[str, Any], parts: list[torch.Tensor]) -> None:
        sizes = [part.nbytes for part in parts]
        if sum(sizes) > self._row.nbytes:  # the first one, or of a large tensor
            self._row = self.carrier.empty(max(sum(sizes), 2 * _CHUNK_BYTES))
            self._handles = b64encode(pickle.dumps(self.carrier.handles(self._row))).decode()
        torch.cat(parts, out=self._row[: sum(sizes)])
        _wait_for(self._row)
        body = info | {"tensor_sizes": sizes, "ipc_handles_pickled": self._handles}
        try:
            self.server.ask(_UPDATE, {"update_info": body})
        except RunError as error:
            raise RunError(error.operation, f"{error.cause}; {NO_TRANSFER}") from None


def _wait_for(row: torch.Tensor) -> None:
    """Return once a row has its bytes, which are read on another stream or by another process."""
    if row.is_cuda:
        torch.cuda.current_stream(row.device).synchronize()


class AdapterFiles:
    """Send an adapter as peft's files; before the first one, the weights that it changes.

    base: yields those weights.

    Each adapter has a name of its own on the server. One that replaces another under its name
    (`load_inplace`) would be read from its files again in each step: vLLM 0.32 keeps that flag with the name,
    and passes it on with each request. The server may also read files again later, when it has dropped an
    adapter, so they stay until the next one is loaded.
    """

    def __init__(self, files: WeightFiles, adapter: PeftAdapter, base: Callable[[], NamedTensors]) -> None:
        self.adapter, self.name = adapter, ""
        self._files, self._base = files, base
        self._folder = ExitStack()

    def send(self, weights: NamedTensors, pause: Callable[[], None]) -> str:
        tensors = {name: value.cpu().contiguous() for name, value in self._checked(weights)}
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="posttrain-adapter-", dir=self._files.folder)
            place = Path(stack.enter_context(folder))
            file = place / "adapter_model.safetensors"
            save_file(tensors, str(file), metadata={"format": "pt"})
            (place / "adapter_config.json").write_text(self.adapter.config)
            adapters = self._loaded()
            if self.name in adapters:
                pause()
            else:  # the first, or the server was started again
                self._send_base(pause)
            name = f"{_PREFIX}{secrets.token_hex(8)}"
            self._ask("load", {"lora_name": name, "lora_path": str(place)})
            for other in adapters:
                self._ask("unload", {"lora_name": other})
            received = digest(LazyTensors(file).items())
            self.close()
            self.name, self._folder = name, stack.pop_all()
        return received

    def close(self) -> None:
        """Remove the files of the last adapter."""
        self._folder.close()

    def _loaded(self) -> list[str]:
        """Return the names of the server's adapters that this run loaded, or one that has ended."""
        answer = self._files.server.ask(MODELS, method="GET")
        with self._files.server.expecting("does not say which adapters it serves"):
            return [name for card in answer["data"] if (name := str(card["id"])).startswith(_PREFIX)]

    def _send_base(self, pause: Callable[[], None]) -> None:
        received = self._files.send(self._base(), pause)
        if received != self.adapter.base:
            raise self._files.server.fault(
                "holds other weights than those that the learner's adapter changes: "
                f"digest {received}, not {self.adapter.base}"
            )

    def _ask(self, verb: str, body: dict[str, str]) -> None:
        try:
            self._files.server.ask(f"/v1/{verb}_lora_adapter", body, text=True)
        except RunError as error:
            raise RunError(error.operation, f"{error.cause}; {NO_ADAPTERS}") from None

    def _checked(self, weights: NamedTensors) -> NamedTensors:
        """Yield the tensors of an adapter; raise for those that do not fit the model."""
        shapes, tensors = self._files.expected.shapes, dict(weights)
        for name in tensors:
            owner = name.removesuffix(_A).removesuffix(_B)
            weight = shapes.get(f"{owner.removeprefix(_PEFT)}.weight")
            if weight is None or not {f"{owner}{_A}", f"{owner}{_B}"} <= tensors.keys():
                raise KeyError(f"the adapter holds {name}, of which the model or it lacks the rest")
            a, b = tensors[f"{owner}{_A}"].shape, tensors[f"{owner}{_B}"].shape
            if (b[0], a[1]) != tuple(weight) or a[0] != b[1]:
                raise ValueError(f"{name} does not fit a weight of shape {tuple(weight)}")
        return ((name, tensor.detach().to(self._files.dtype)) for name, tensor in tensors.items())
