"""One request's life: placed, sent, perhaps redispatched, relayed, and finished in one place."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from policies.admission import Priority, Shed, Ticket
from policies.balancer import NoReplica
from policies.lease import Lease
from policies.responses import issued
from policies.types import OUTCOMES, Cause, Outcome, Phase, Replica, Request, State, Usage
from router import errors
from router.errors import Refusal
from router.identity import is_json, model_of, responses
from router.pools import HEADER as POOL_HEADER
from router.proxy import guard, usage
from router.proxy.connection import UpstreamConnection
from router.proxy.headers import Header, named_in_connection, request_head, response_head
from router.proxy.opening import Opening, Verdict
from router.proxy.room import PRIORITIES
from router.proxy.upstream import Upstream, is_ours

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from router.decisions import Decision
    from router.identity import Identity
    from router.keys import Holder
    from router.pools import Pools
    from router.proxy.downstream import Downstream
    from router.proxy.proxy import Proxy
    from router.sharing import Claim

log = logging.getLogger("warmroute.proxy")

BYTES_PER_TOKEN = 4
"""Of a JSON prompt in English and code; only the router's guess until usage is reported."""

JOIN_BYTES = 65_536
"""Bodies up to this are copied behind their head: one buffer takes uvloop's short way to the socket, several do not."""

_BUSY = ("busy", "queue_full")

# Those that every request meets, taken once: an enum's member is looked up through its metaclass each time it is named,
# 60 ns in Python 3.11.
_DONE = Cause.DONE
_QUEUE, _HEADERS, _BODY = Phase.QUEUE, Phase.HEADERS, Phase.BODY


class Exchange:
    """A request and its answer. Made when the request's first byte arrives; `_finish` ends it, always and once."""

    __slots__ = (
        "_beginning",
        "_chunk_out",
        "_opening",
        "_progress",
        "_streamed",
        "admitted",
        "body",
        "body_bytes",
        "chunks",
        "claim",
        "committed",
        "connect_task",
        "connection",
        "connection_values",
        "content_type",
        "cors",
        "decision",
        "downstream",
        "expect_continue",
        "finished",
        "first_byte_at",
        "has_place",
        "head_only",
        "headed",
        "headers",
        "holder",
        "host",
        "http10",
        "identifier",
        "identity",
        "keep_alive",
        "kept",
        "known",
        "lease",
        "method",
        "path",
        "phase",
        "pools",
        "preflight",
        "priority",
        "proxy",
        "queued_s",
        "received_at",
        "refusal",
        "repeatable",
        "request",
        "resent",
        "sent_bytes",
        "since",
        "span",
        "started_at",
        "status",
        "target",
        "ticket",
        "tries",
        "why",
    )

    def __init__(self, downstream: Downstream) -> None:
        self.downstream = downstream
        self.proxy: Proxy = downstream.proxy
        self.started_at = self.proxy.clock()
        self.since = self.started_at
        """When the present phase began, seconds, to the sweeper's resolution."""
        self.headers: list[Header] = []
        self.connection_values: list[bytes] = []
        self.known: dict[bytes, bytes] = {}
        """Headers that identity looks at."""
        self.body: list[bytes] = []
        self.request = Request()

        # The request, filled in by Downstream
        self.method = b""
        self.target = b""
        self.path = ""
        """The target's path in normal form."""
        self.host = b""
        self.http10 = False
        self.headed = False
        """Whether the head has been read whole."""
        self.head_only = False
        self.content_type = b""
        self.expect_continue = False
        self.body_bytes = 0
        self.keep_alive = True
        self.identifier = b""
        self.refusal: Refusal | None = None
        self.holder: Holder | None = None
        """Whose key it came with, where keys are asked for."""
        self.has_place = False
        """It counts among its holder's requests in flight, until it ends."""
        self.cors = b""
        """Header lines for browsers, whatever it is answered."""
        self.preflight = False
        """A browser asks whether a page may ask."""
        self.span: Span | None = None
        """Its span, when requests are traced."""
        self.received_at = 0.0
        """When the request had arrived whole, seconds."""

        # Where it goes
        self.pools: Pools | None = None
        """Those that it chose its own among; None where there is no choice."""
        self.identity: Identity | None = None
        self.priority = Priority.NORMAL
        self.ticket: Ticket | None = None
        """While it waits in the room."""
        self.admitted = False
        self.claim: Claim | None = None
        """While other routers are asked what they know of its session, and it has no place yet."""
        self.queued_s: float | None = None
        """How long it waited there; None when it did not have to."""
        self.lease: Lease | None = None
        self.decision: Decision | None = None
        """The last made for it, while those are remembered."""
        self.connection: UpstreamConnection | None = None
        self.connect_task: asyncio.Task[None] | None = None
        self.repeatable = False
        self.kept = False
        """Its answer is a response that the replica keeps, to be gone on from or asked for by its id."""
        self.tries = 0
        self.resent = False
        self.why = ""
        """Why the last replica tried failed it."""

        # The answer
        self.phase = Phase.REQUEST
        self.status = 0
        self.committed = False
        """Whether anything was passed on, so that the request can go nowhere else."""
        self.first_byte_at = 0.0
        self.sent_bytes = 0
        self.chunks = 0
        """Of the answer, as the replica sent them; 0 when it was not chunked. Known when it is finished."""
        self.finished = False
        self._chunk_out = False
        self._streamed = False
        """The answer comes token by token."""
        self._opening: Opening | None = None
        """What is held of the answer until it is known to be one."""
        self._beginning = b""
        """Its first few KB, where usage may be told."""
        self._progress = 0

    # Placing

    def start(self) -> None:
        """The request is whole and it is its turn: place it and send it."""
        proxy = self.proxy
        self.received_at = proxy.clock()
        if proxy.tracing is not None:
            proxy.tracing.begin(self)
        if self.refusal is not None:
            self.refuse(self.refusal)
            return
        if self.preflight:
            self._answer_preflight()
            return
        self.phase = _QUEUE
        route = guard.route(self.target)
        self.path = route.path
        if route.admin and not proxy.allows(route.path):
            self.refuse(errors.ADMIN_PATH)
            return
        if route.climbs:
            self.refuse(errors.BAD_TARGET)
            return
        self.repeatable = guard.is_repeatable(self.method, route)
        if proxy.priority_header and not self._take_priority(proxy.priority_header):
            self.refuse(errors.PRIORITY)
            return
        if self._choose_pool():
            proxy.budget.earn()
            self._find_place(route)

    def _find_place(self, route: guard.Route) -> None:
        """By what is known of it here, or at other routers."""
        proxy = self.proxy
        self._identify(route)
        if proxy.sharing is not None and (self.request.turn or self.request.response is not None):
            self.claim = proxy.sharing.ask(self.request, self.received_at, self._dispatch)
            if self.claim is not None:
                return
        self._dispatch()

    def _take_priority(self, name: bytes) -> bool:
        """From the header of that name. False when its value is none of those known."""
        for lower, _, value in self.headers:
            if lower == name:
                priority = PRIORITIES.get(value.lower())
                if priority is None:
                    return False
                self.priority = priority
        return True

    def pools_changed(self) -> None:
        """What waits must not be sent to replicas that stood for its pool once: it is placed anew, if it has no place.

        Not at once: the pools are a part of what is being put in force.
        """
        ticket, self.ticket = self.ticket, None
        claim, self.claim = self.claim, None
        if ticket is not None:
            ticket.withdraw()
            self._waited(ticket, self.proxy.clock())
        if claim is not None:
            claim.placed(None)
        if ticket is not None or claim is not None:
            self.proxy.loop.call_soon(self._choose_again)

    def _choose_again(self) -> None:
        """Among the pools that there are now. Whom it has tried stays tried."""
        if self.finished:
            return  # the client has left
        self.request = Request(failed=self.request.failed)
        if self._choose_pool():
            self._find_place(guard.route(self.target))

    def _choose_pool(self) -> bool:
        """False when it names one that there is not, and is refused."""
        self.pools = self.proxy.pools
        if self.pools is None or self._take_pool(self.pools):
            return True
        self.refuse(errors.unknown_pool(self.pools.names))
        return False

    def _take_pool(self, pools: Pools) -> bool:
        """From the header that names one, else by the model that the body asks for. False when there is none such."""
        named = None
        for lower, _, value in self.headers:
            if lower == POOL_HEADER:
                named = value
        if named is not None:
            pool = pools.of_header(named)
            self.request.pool = pool or ""
            return pool is not None
        if self.body_bytes and is_json(self.known, self.content_type):
            model = model_of(self._whole_body())
            self.request.pool = "" if model is None else pools.of_model(model)
        return True

    def _whole_body(self) -> bytes:
        """In one piece from now on."""
        if len(self.body) > 1:
            self.body = [b"".join(self.body)]
        return self.body[0]

    def _identify(self, route: guard.Route) -> None:
        proxy, pool = self.proxy, self.request.pool
        tenant = self.holder.tenant if self.holder is not None else b""
        identity = proxy.identity.from_headers(self.known, tenant, pool.encode() if pool else b"")
        wants = proxy.wants()
        look = wants.body or (wants.session and identity.key is None)
        if look and self.body_bytes and route.conversation:
            identity = proxy.look_into(identity, self._whole_body(), self.content_type, self.received_at)
        self.identity = identity
        request = self.request
        request.key = identity.key
        request.parent = identity.parent
        request.fingerprint = identity.fingerprint
        request.blocks = identity.blocks
        request.turn = self.body_bytes > 0 and route.turn
        request.prompt_tokens = self.body_bytes // BYTES_PER_TOKEN if request.turn else 0
        self.admitted |= self.body_bytes == 0  # a list of models costs an engine nothing: it need not wait
        if route.response is not None:
            self._name_response(route.response)

    def _name_response(self, named: str | None) -> None:
        """Which response it goes on from or asks for, and whether its answer is one. `named`: by the path."""
        identity = self.identity
        assert identity is not None
        self.admitted |= bool(named)  # nor does that, whatever its body: a few clients send one, as {}
        if not named and self.body_bytes and not identity.encoded:
            body = self._whole_body()
            named = responses.previous(body)
            self.kept = responses.kept(body)
        if named:
            self.request.response = self.proxy.identity.response_key(named, identity.tenant)

    def _dispatch(self) -> None:
        """Find a place: at once, or after waiting in the room. A request that was let in does not wait again."""
        proxy = self.proxy
        now = proxy.clock()
        lease: Lease | None
        try:
            if self.admitted:
                lease = proxy.balancer.acquire(self.request, now)
            else:
                lease = proxy.room.enter(self, self.priority, now)
        except Exception as error:
            self._unplaced(error)
            return
        if lease is not None:
            self._placed(lease, now)

    def called(self, ticket: Ticket) -> None:
        """Its turn has come in the wait room, for better or worse."""
        self.ticket = None
        now = self.proxy.clock()
        self._waited(ticket, now)
        if ticket.lease is None:
            self._unplaced(ticket.error)
        elif self.finished:  # the client left as it was called
            ticket.lease.finish(OUTCOMES[Cause.CLIENT, Phase.QUEUE], None, now)
        else:
            self._placed(ticket.lease, now)

    def _waited(self, ticket: Ticket, now: float) -> None:
        self.queued_s = (self.queued_s or 0.0) + now - ticket.entered_at

    def _unplaced(self, error: Exception | None) -> None:
        if isinstance(error, Shed):
            self.refuse(errors.shed(error.reason, error.retry_after_s))
        elif isinstance(error, NoReplica):
            self.refuse(errors.QUEUE_FULL if self.why in _BUSY else errors.NO_REPLICA[error.reason])
        else:  # a client must not wait for what will never come
            log.error("placing a request failed in a way it should not", exc_info=error)
            self.refuse(errors.INTERNAL)

    def _placed(self, lease: Lease, now: float) -> None:
        proxy = self.proxy
        self.admitted = True
        self.lease = lease
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.placed(lease.replica)
        self.tries += 1
        proxy.metrics.routed(lease.choice)
        proxy.decisions.placed(self, lease, now)
        upstream = lease.replica.address
        assert isinstance(upstream, Upstream)
        # What must not be run twice is sent on a connection of its own: on a kept one, its being closed by the
        # replica cannot be told from the replica's death while it ran.
        connection = upstream.take(now) if self.repeatable else None
        if connection is not None:
            self._send(connection)
        else:
            self._connect(upstream)

    def _connect(self, upstream: Upstream) -> None:
        self.phase = Phase.CONNECT
        self.connect_task = self.proxy.loop.create_task(self._open(upstream))

    async def _open(self, upstream: Upstream) -> None:
        try:
            connection = await upstream.connect()
        except TimeoutError:
            self.connect_task = None
            self._failed("connect_timeout", repeatable=True)
        except (OSError, ValueError) as error:  # refused, unreachable, no such name, TLS failure
            self.connect_task = None
            if is_ours(error):
                self._short(errors.CONNECTIONS)
                return
            self._failed("connect", repeatable=True)
        else:
            self.connect_task = None
            if connection.alive:
                self._send(connection)
            else:  # lost before this task ran again
                self._failed("connect", repeatable=True)

    def _send(self, connection: UpstreamConnection) -> None:
        upstream = connection.upstream
        self.connection = connection
        self.phase = _HEADERS
        self.since = self.proxy.now
        target = self.target if not upstream.base or self.target == b"*" else upstream.base + self.target
        hop = named_in_connection(self.connection_values)
        if self.proxy.request_drop is not None:
            hop |= self.proxy.request_drop.among(self.headers)
        if upstream.replaced:
            hop |= upstream.replaced
        head = request_head(
            self.method,
            target,
            upstream.authority,
            self.headers,
            hop=hop,
            host=self.host,
            sender=self.downstream.sender,
            identifier=self.identifier,
            length=self.body_bytes if self.body or self.method in (b"POST", b"PUT", b"PATCH") else None,
            extra=upstream.extra,
        )
        if self.body_bytes <= JOIN_BYTES:
            connection.send(self, [b"".join((head, *self.body))])
        else:
            connection.send(self, [head, *self.body])

    # What the replica does

    def on_data(self, connection: UpstreamConnection) -> None:
        """The connection has parsed something: a head, some body, an end, or nonsense."""
        if connection.unsound is not None and not self.committed:
            self._failed("invalid", refusal=errors.UPSTREAM_INVALID)
            return
        if connection.interim:
            self._pass_interim(connection)
        if not connection.headed:
            return
        fragments = connection.fragments
        if fragments:
            connection.fragments = []
        if not self.committed:
            opening = self._opening
            if opening is None:
                if not self._on_head(connection):
                    return
                opening = self._opening
            if opening is not None:
                verdict = opening.add(fragments, ended=connection.complete or connection.unsound is not None)
                if verdict is Verdict.UNDECIDED:
                    return
                if verdict is Verdict.BUSY:
                    self._failed("queue_full", repeatable=True)
                    return
                fragments = opening.fragments
                self._beginning = opening.head(usage.HEAD_BYTES)
                self._opening = None
            out = [self._commit(connection)]
        else:
            out = []
        if fragments and not self.first_byte_at:
            self._first_byte()
            if self.kept and self.status == 200:
                self._remember(self._beginning or fragments[0][: usage.HEAD_BYTES])
        if self._chunk_out:
            for fragment in fragments:
                out.append(b"%x\r\n%b\r\n" % (len(fragment), fragment))
            if connection.complete:
                out.append(b"0\r\n\r\n")
        else:
            out += fragments
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            self.sent_bytes += len(data)
            self.downstream.write(data)
        if connection.complete:
            self._finish(_DONE)
            self.downstream.done(self)
        elif connection.unsound is not None:
            self._broken(Cause.UPSTREAM)

    def _pass_interim(self, connection: UpstreamConnection) -> None:
        for status, phrase, headers, hop in connection.interim:
            if status not in (100, 101) and not self.http10 and not self.committed:
                if self.proxy.response_drop is not None:
                    hop |= self.proxy.response_drop.among(headers)
                head = response_head(
                    status, phrase, headers, hop=hop, framing=b"", extra=b"", identifier=self.identifier
                )
                self.downstream.write(head)
        connection.interim = []

    def _on_head(self, connection: UpstreamConnection) -> bool:
        """Look at a final head before anything is passed on. False when the request went elsewhere."""
        status = connection.status
        lease = self.lease
        assert lease is not None
        if status == 503:
            self._failed("busy", repeatable=True)
            return False
        if status < 500:
            self.proxy.health.succeeded(lease.replica)
        stream = encoded = False
        for lower, _, value in connection.headers:
            if lower == b"content-type" and value.startswith(b"text/event-stream"):
                stream = True
            elif lower == b"content-encoding" and value != b"identity":
                encoded = True
        self._streamed = stream
        told_later = (status == 200 and stream) or (status == 400 and self.path.endswith("v1/responses"))
        if told_later and self.repeatable and not encoded and not self.head_only:
            self._opening = Opening(stream=status == 200)
        return True

    def _commit(self, connection: UpstreamConnection) -> bytes:
        """From here on the client is being answered. Returns the head."""
        self.committed = True
        self._free_body()
        self.phase = _BODY
        self.since = self.proxy.now
        self.status = connection.status
        if self.downstream.paused_since is not None:
            self.hold_back()
        framing = b""
        bodiless = self.head_only or connection.status in (204, 304)
        self._settle_keep_alive()
        if connection.chunked or not connection.delimited:
            if self.http10:
                self.keep_alive = False
            elif self.head_only or not bodiless:
                framing = b"transfer-encoding: chunked\r\n"
                self._chunk_out = not bodiless
        extra = self.cors
        if self.lease is not None:
            extra += self.proxy.explain(self.lease)
        if not self.keep_alive:
            extra += b"connection: close\r\n"
        elif self.http10:
            extra += b"connection: keep-alive\r\n"
        if self._chunk_out and connection.chunked:
            connection.write = self.downstream.write
            connection.relaying = True
        hop = connection.hop
        if connection.status == 204:
            hop |= {b"content-length"}  # RFC 9110, section 8.6: there is no body, whatever length is claimed
        if self.proxy.response_drop is not None:
            hop |= self.proxy.response_drop.among(connection.headers)
        return response_head(
            connection.status,
            connection.phrase,
            connection.headers,
            hop=hop,
            framing=framing,
            extra=extra,
            identifier=self.identifier,
        )

    def _first_byte(self) -> None:
        now = self.proxy.clock()
        self.first_byte_at = now
        assert self.lease is not None
        if self.status < 400:  # a refusal computed nothing
            self.lease.timed = self.lease.timed and self._streamed
            try:
                self.lease.first_token(now)
            except Exception:
                log.exception("the beginning of an answer taught nothing, in a way it should not")
        self.proxy.metrics.first_byte(self.lease.choice.reason, now - self.received_at)

    def _remember(self, beginning: bytes) -> None:
        """The answer begins with the id of a response that only this replica has: before the client knows it, too."""
        proxy, lease, identity = self.proxy, self.lease, self.identity
        response = responses.issued(beginning)
        if response is None or lease is None or identity is None or not lease.replica.keeps_responses:
            return
        key = proxy.identity.response_key(response, identity.tenant)
        if key is not None:
            note = issued(key, lease.replica)
            proxy.balancer.hear(note, self.first_byte_at)
            if proxy.sharing is not None:
                proxy.sharing.tell_issued(note)

    def hold_back(self) -> None:
        """The client does not keep up: read no more from the replica, whose own pace is not seen any more."""
        if self.connection is not None:
            self.connection.pause()
        if self.lease is not None:
            self.lease.timed = False

    def upstream_lost(self, connection: UpstreamConnection) -> None:
        """The connection ended before the answer did."""
        if self.committed:
            self._broken(Cause.UPSTREAM)
        elif connection.reused and connection.received == 0 and not self.resent:
            # The replica closed a kept-alive connection just as the request was sent: nothing ran.
            self.resent = True
            self.connection = None
            self._connect(connection.upstream)
        else:
            self._failed("reset", refusal=errors.UPSTREAM_CLOSED)

    # Going elsewhere

    def _failed(self, why: str, *, repeatable: bool = False, refusal: Refusal = errors.UPSTREAM_CLOSED) -> None:
        """This replica did not serve the request, and nothing was passed on: try another, or refuse.

        `repeatable`: nothing ran, so that any request may be sent again. `refusal`: the answer if it may not.
        """
        proxy = self.proxy
        lease = self.lease
        assert lease is not None
        phase = self.phase
        replica: Replica = lease.replica
        if why not in _BUSY:
            self._blame(replica, why)
        self._drop_upstream()
        self._give_up(lease, OUTCOMES[Cause.UPSTREAM, phase])
        self.lease = None
        proxy.room.freed()
        self.why = why
        self.request.failed += self._struck(replica, why)
        if not (repeatable or self.repeatable):
            self.refuse(refusal)
        elif self.tries >= proxy.tries or self.request.issuer is replica:
            # Any other than the issuer would say that there is no such response.
            self.refuse(errors.QUEUE_FULL if why in _BUSY else errors.TRIES_EXHAUSTED)
        elif replica.state is not State.EJECTED and not proxy.budget.spend():
            # What waited on a replica that is out by now costs nothing: it is as many as were there, and no more come.
            self.refuse(errors.BUDGET_EXHAUSTED)
        else:
            proxy.metrics.redispatched(why)
            self._opening = None
            if self.pools is proxy.pools:
                self._dispatch()
            else:
                self._choose_again()

    def _struck(self, replica: Replica, why: str) -> tuple[Replica, ...]:
        """What this request is not to try again: the replica, and unless only its queue is full, all ranks beside it.

        They are one server: whoever cannot reach one of them reaches none.
        """
        address = replica.address
        if not isinstance(address, Upstream) or address.rank is None or why in _BUSY:
            return (replica,)
        fleet = self.proxy.balancer.replicas.values()
        beside = (each for each in fleet if isinstance(each.address, Upstream) and each.address.url == address.url)
        return (replica, *(each for each in beside if each is not replica))

    def _short(self, refusal: Refusal) -> None:
        """We could not even try: no other replica would do better, and none is to blame."""
        assert self.lease is not None
        self._give_up(self.lease, OUTCOMES[Cause.ROUTER, self.phase])
        self.lease = None
        self.proxy.room.freed()
        self.refuse(refusal)

    def _blame(self, replica: Replica, why: str) -> None:
        """It failed the request, which goes on, whatever becomes of what is learned from that."""
        try:
            self.proxy.health.failed(replica, why)
        except Exception:
            log.exception("a failure was not noted, in a way it should not")

    def _give_up(self, lease: Lease, outcome: Outcome) -> None:
        """The place, likewise."""
        try:
            lease.finish(outcome, None, self.proxy.clock())
        except Exception:
            log.exception("a failure taught nothing, in a way it should not")

    def _drop_upstream(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        task, self.connect_task = self.connect_task, None
        if task is not None:
            task.cancel()

    # Ends

    def refuse(self, refusal: Refusal) -> None:
        """Answer the client ourselves. Nothing was passed on yet."""
        self.refusal = refusal
        self.status = refusal.status
        self._settle_keep_alive()
        answer = errors.render(
            refusal,
            close=not self.keep_alive,
            head_only=self.head_only,
            request_id=self.identifier,
            extra=self.cors,
        )
        cause = Cause.UPSTREAM if self.why else Cause.ROUTER
        if refusal.status == 408 or refusal.status == 504:
            cause = Cause.TIMEOUT
        elif refusal.status < 500:
            cause = Cause.CLIENT
        self._answer(answer, cause)

    def _answer_preflight(self) -> None:
        """Tell a browser what it may ask for; a page of an unknown origin is told nothing, which forbids it."""
        self.status = 204
        self._settle_keep_alive()
        extra = self.cors if self.keep_alive else self.cors + b"connection: close\r\n"
        answer = response_head(
            204, b"No Content", (), hop=frozenset(), framing=b"", extra=extra, identifier=self.identifier
        )
        self._answer(answer, Cause.DONE)

    def _answer(self, answer: bytes, cause: Cause) -> None:
        """Send a whole answer of our own, and be done."""
        self.sent_bytes += len(answer)
        self.committed = True
        self.downstream.write(answer)
        self._finish(cause)
        self.downstream.done(self)

    def _settle_keep_alive(self) -> None:
        """Whether the connection lives on behind this answer, as its head is to say."""
        if self.downstream.closing or self.proxy.draining:
            self.keep_alive = False

    def _broken(self, cause: Cause) -> None:
        """The answer broke off after it had begun: the client must not take it for whole."""
        if self.lease is not None and cause is Cause.UPSTREAM:
            self._blame(self.lease.replica, "broken")
        self.keep_alive = False
        self._finish(cause)
        self.downstream.break_off(self)

    def client_left(self) -> None:
        """The client's connection is gone: free the replica at once."""
        connection = self.connection
        if connection is not None and self.committed and usage.ended(connection.tail):
            self._finish(Cause.DONE)
        else:
            self._finish(Cause.ROUTER if self.proxy.cutting else Cause.CLIENT)

    def sweep(self, now: float) -> None:
        """Called about once a second while it is this exchange's turn."""
        proxy = self.proxy
        connection = self.connection
        if self.phase is Phase.HEADERS:
            if now - self.since > proxy.timeouts.first_byte_s:
                if self.lease is not None:
                    proxy.health.failed(self.lease.replica, "first_byte_timeout")
                self._drop_upstream()
                self.refuse(errors.FIRST_BYTE_TIMEOUT)
            elif (
                self.repeatable
                and proxy.balancer.ready_in(self.request.pool)
                and self.lease is not None
                and proxy.health.gone(self.lease.replica)
            ):
                self._failed("silent", repeatable=True)
        elif self.phase is Phase.BODY and connection is not None:
            progress = connection.received + connection.relayed
            if progress != self._progress or self.downstream.paused_since is not None:
                self._progress = progress
                self.since = now
            elif now - self.since > proxy.timeouts.idle_s:
                self._broken(Cause.TIMEOUT)

    def _free_body(self) -> None:
        """The request will not be sent again: its body need not be held."""
        if self.body:
            self.proxy.body_bytes -= self.body_bytes
            self.body = []

    def _finish(self, cause: Cause) -> None:
        """The one place where everything that was taken is given back."""
        if self.finished:
            return
        self.finished = True
        proxy = self.proxy
        now = proxy.clock()
        outcome = OUTCOMES[cause, self.phase]
        connection, self.connection = self.connection, None
        tokens: Usage | None = None
        if connection is not None:
            if self.committed and self.status < 400:
                tokens = usage.read(self._beginning, connection.tail)
            self.sent_bytes += connection.relayed
            self.chunks = connection.chunks
            if connection.complete and cause is _DONE:
                connection.release(now)
            else:
                connection.close()
        task, self.connect_task = self.connect_task, None
        if task is not None:
            task.cancel()
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.placed(None)
        if self.holder is not None and self.has_place:
            self.holder.in_flight -= 1
        self._free_body()
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.cancel(now)
        lease = self.lease
        # The client has its answer, whatever becomes of what is learned from it, and wants its next one.
        try:
            if lease is not None:
                if cause is _DONE:
                    proxy.health.answered(lease.replica, self.status)
                lease.finish(outcome, tokens, now)
        except Exception:
            log.exception("an answer taught nothing, in a way it should not")
        try:
            proxy.finished(self, outcome, tokens, now)
        except Exception:
            log.exception("an answer was not counted or logged, in a way it should not")
        if lease is not None or ticket is not None:
            proxy.room.freed()
