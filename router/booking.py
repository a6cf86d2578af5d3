"""What workers are told about requests, and what is booked on them for it."""

from __future__ import annotations

import logging

from protocol.messages import Admit, Cancel, Prefill, PrefillDone
from router.events import Requeue, SendAdmit, SendCancel, SendPrefill, SparePrefill, Unpair
from router.membership import Membership
from router.request import Request
from router.workers import Worker

log = logging.getLogger("baton.router")


class Booking:
    """Every message carries our epoch and the request's id and generation."""

    def __init__(self, members: Membership, local_tail_tokens: int) -> None:
        self._members = members
        self._table = members.table
        self._local_tail_tokens = local_tail_tokens

    def admit(self, request: Request, command: SendAdmit) -> bool:
        """False: it can't be delivered."""
        worker = self._table.get(command.to)
        assert worker is not None, "placement chose a worker that isn't there"
        order, life = request.order, request.life
        worker.requests[order.request_id] = order.num_tokens
        prefill = self._table.get(command.prefill.epoch) if command.prefill else None
        if prefill is not None:
            prefill.requests[order.request_id] = max(0, len(order.token_ids) - prefill.held.num_tokens(order.chain))
        admit = Admit(
            epoch=self._members.epoch,
            request_id=order.request_id,
            generation=life.generation,
            token_ids=order.token_ids,
            sampling=order.sampling,
            prefill=command.prefill,
            local_tokens=self._local_tail_tokens,
            cache=order.cache,
        )
        return self._members.send(worker, admit)

    def prefill(self, request: Request, command: SendPrefill) -> None:
        worker = self._table.get(command.to)
        assert worker is not None, "a lost worker's requests have ended"
        order = request.order
        prefill = Prefill(
            epoch=self._members.epoch,
            request_id=order.request_id,
            generation=request.life.generation,
            token_ids=order.token_ids[:-1],
            decode_epoch=command.decode,
            cache=order.cache,
        )
        worker.held.note(order.chain)
        self._members.send(worker, prefill)

    def note_prefill_done(self, message: PrefillDone) -> None:
        worker = self._table.get(message.epoch)
        if worker is not None and message.request_id in worker.requests:
            worker.requests[message.request_id] = 0

    def spare_prefill(self, request: Request, command: SparePrefill) -> None:
        worker = self._table.get(command.epoch)
        if worker is not None:
            worker.requests.pop(request.order.request_id, None)

    def cancel(self, request: Request, command: SendCancel) -> None:
        worker, key = self._table.get(command.to), request.life
        if worker is not None:
            cancel = Cancel(epoch=self._members.epoch, request_id=key.request_id, generation=key.generation, keep=command.keep)
            self._members.send(worker, cancel)

    def unpair(self, request: Request, command: Unpair) -> None:
        request.refused_pairs |= {(command.decode, command.prefill)}  # once is enough, whatever D reports until then
        decode, prefill = self._table.get(command.decode), self._table.get(command.prefill)
        if decode is not None and prefill is not None:
            log.warning("%s isn't paired with %s any more: %s", decode.worker_id, prefill.worker_id, command.reason)
            self._table.note_refused_pair(decode, command.prefill, command.reason)

    def note_declined(self, request: Request, command: Requeue) -> None:
        worker = self._table.get(command.declined)
        if worker is not None and command.why == "draining":
            worker.draining = True
        elif worker is not None and command.why == "busy":
            size = request.order.num_tokens
            worker.refused_tokens = size if worker.refused_tokens is None else min(size, worker.refused_tokens)
        if command.why in ("busy", "draining"):
            request.tried |= {command.declined}

    def holders(self, request: Request) -> list[Worker]:
        """The workers that have it."""
        return [worker for worker in self._table if request.order.request_id in worker.requests]

    def release(self, request: Request) -> list[Worker]:
        """The workers that had it."""
        return [worker for worker in self._table if worker.requests.pop(request.order.request_id, None) is not None]
