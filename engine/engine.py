"""The offline engine: prompts in, completions out, in this process. It drives the same core as the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from engine.completion import Completion, GrowingCompletion, Piece
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.policies import OURS, Policies
from engine.progress import Progress, progress_bar
from engine.prompts import Params, Prompts, as_params, as_token_ids
from engine.request import EngineEvent, EngineRequest
from engine.tokenizer import GrowingText, load_tokenizer
from protocol.errors import EngineStopped, RequestFailed
from protocol.ids import RequestId, RequestKey


class Engine:
    """A model that is ready to answer. For one thread; several streams of that thread may be open at once.

    ``settings`` are those of EngineConfig: ``Engine(path, speculation=5, kernels="torch")``.
    """

    def __init__(self, path: str | Path, *, policies: Policies = OURS, **settings: Any) -> None:
        """Load the checkpoint directory ``path``.

        Raises CheckpointError, ValueError that names the setting, TypeError for an unknown setting.
        """
        config = EngineConfig(model=Path(path), **settings)
        self._tokenizer = load_tokenizer(config.model)
        self._core: EngineCore | None = EngineCore(config, policies=policies)
        self._streams: WeakValueDictionary[RequestKey, PieceStream] = WeakValueDictionary()
        self._numbers = count()
        self._given_up: list[RequestKey] = []
        self._in_step = False

    def generate(
        self, prompts: Prompts, params: Params | None = None, *, progress: bool | Callable[[int, int], None] = False
    ) -> list[Completion]:
        """One completion per prompt, in their order. The batch doesn't change a completion: each is what it would be alone.

        Prompts are texts or lists of token ids; ``params`` one for all or one for each. ``progress``: True draws a bar on
        standard error, a function is called with (completed, all) after each completion.

        Raises ValueError that names the prompt or parameter before any work, and RequestFailed; then all are given up.
        """
        stream = self.stream(prompts, params)
        done: dict[int, Completion] = {}
        with stream, _progress(progress, len(stream)) as tell:
            for piece in stream:
                if piece.completion is not None:
                    done[piece.index] = piece.completion
                    tell(len(done), len(stream))
        return [done[index] for index in range(len(stream))]

    def stream(self, prompts: Prompts, params: Params | None = None) -> PieceStream:
        """The same, piece by piece as the steps give them; a prompt's last piece carries its completion.

        Bad arguments raise here, not at the first piece.
        """
        token_ids = as_token_ids(prompts, self._tokenizer)
        samplings = as_params(params, len(token_ids))
        stream = PieceStream(self._step, self._give_up)
        for index, (ids, sampling) in enumerate(zip(token_ids, samplings, strict=True)):
            key = RequestKey(RequestId(f"offline-{next(self._numbers)}"), 0)
            try:
                self.core.submit(EngineRequest(key=key, token_ids=ids, sampling=sampling))
            except ValueError as error:
                stream.close()
                raise ValueError(f"prompts[{index}]: {error}") from error
            text = GrowingText(self._tokenizer, ids) if self._tokenizer is not None else None
            stream.add(key, GrowingCompletion(index, ids, text))
            self._streams[key] = stream
        return stream

    @property
    def core(self) -> EngineCore:
        """The engine core. Raises EngineStopped after ``close``."""
        if self._core is None:
            raise EngineStopped("the engine is closed")
        return self._core

    def close(self) -> None:
        """Give up what is open, and free the model's memory. May be called again."""
        self._give_up(list(self._streams))
        if self._core is not None:
            self._core.close()
        self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _step(self) -> None:
        """One step of the core; its events go to the streams that they belong to."""
        core = self.core
        assert core.has_work(), "nothing to do, yet something is awaited"
        self._in_step = True
        try:
            events = core.step()
        finally:
            self._in_step = False
        self._give_up(())
        by_key: dict[RequestKey, list[EngineEvent]] = {}
        for event in events:
            by_key.setdefault(event.key, []).append(event)
        for key, own in by_key.items():
            stream = self._streams.get(key)
            if stream is not None:
                stream.take(key, own)

    def _give_up(self, keys: Sequence[RequestKey]) -> None:
        """Cancel requests. A stream can be garbage collected in the middle of a step; then they go after it."""
        self._given_up.extend(keys)
        if self._core is None or self._in_step:
            return
        while self._given_up:
            self._core.cancel(self._given_up.pop())


class PieceStream(Iterator[Piece]):
    """Pieces of one call's completions. Closing or dropping it before its end gives all pages back."""

    def __init__(self, step: Callable[[], None], give_up: Callable[[Sequence[RequestKey]], None]) -> None:
        self._step, self._give_up = step, give_up
        self._growing: dict[RequestKey, GrowingCompletion] = {}
        self._ready: deque[Piece] = deque()
        self._failed: RequestFailed | None = None
        self._size = 0

    def add(self, key: RequestKey, growing: GrowingCompletion) -> None:
        self._growing[key] = growing
        self._size += 1

    def take(self, key: RequestKey, events: Sequence[EngineEvent]) -> None:
        """The events that a step brought for one of the requests."""
        try:
            piece = self._growing[key].grow(events)
        except RequestFailed as error:
            self._failed = self._failed or error
            del self._growing[key]
            return
        if piece is not None:
            self._ready.append(piece)
            if piece.completion is not None:
                del self._growing[key]

    def __len__(self) -> int:
        """Number of completions, those still to come included."""
        return self._size

    def __next__(self) -> Piece:
        """Raises RequestFailed when one of the requests failed; the others are given up then."""
        while not self._ready and self._growing and self._failed is None:
            self._step()
        if self._ready:
            return self._ready.popleft()
        if self._failed is not None:
            self.close()
            raise self._failed
        raise StopIteration

    def close(self) -> None:
        keys, self._growing = list(self._growing), {}
        self._ready.clear()
        self._give_up(keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _progress(wanted: bool | Callable[[int, int], None], total: int) -> AbstractContextManager[Progress]:
    if wanted is True:
        return progress_bar(total)
    return nullcontext(wanted or _tell_nobody)


def _tell_nobody(completed: int, total: int) -> None:
    return
