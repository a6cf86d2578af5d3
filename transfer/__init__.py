"""Hand-offs: KV [0, N-1), MTP KV, h(N-1) and the hidden tail, from P's pages into D's, all of it or nothing.

How the pieces fit, for the workers:

- ``Layout(blocks=..., slots=...)`` over the engine's two regions; its ``digest`` goes into the fingerprint.
- One ``Transport`` per process: ``transfer.ucx.UcxTransport()`` inside a running loop (``transfer.loopback`` in tests). Its ``address``
  travels in PairHello / PairWelcome, both sides ``connect`` to the other's, and ``connection.on_lost`` tells of a peer's death within
  milliseconds.
- D, per attempt: reserve pages, then ``ReceiveSession(HandoffReceiver(Reservation(...)), connection, layout, on_command)``
  and ``feed(receive.Begin())``. ``first_tag`` is ``TAGS_PER_HANDOFF`` times a counter of this process. Feed
  ``receive.FromPrefill(message)`` for each Ready, Manifest and HandoffFailed, ``receive.Cancelled`` when the router cancels,
  ``receive.PeerGone`` when P is lost. Do what ``on_command`` gets: Say -> send to P; Fail -> tell the router; Commit ->
  ``core.land(key)``; Ended(ok=False) -> ``core.cancel(key)``, not earlier: until then transfers may still write.
- P, per attempt, made by whichever comes first, the router's Prefill or D's Fetch:
  ``SendSession(HandoffSender(...), layout, on_command)``; set ``session.connection`` when D is known. Feed ``send.PrefillAsked``,
  ``send.FromDecode``, ``send.BlocksReady``, ``send.Sealed`` (with ``checksums.page_checksums``), ``send.GaveUp``,
  ``send.PeerGone``, ``send.LeaseOver``. Do: Compute -> ``core.submit``; Refuse -> tell the router; GrantLease / EndLease ->
  ``Leases``, whose ``take_ended(now)`` yields the keys to feed LeaseOver to; Ended -> ``core.cancel(key)`` or
  ``core.release(key)``, not earlier: until then sends may still read.
"""
