"""Which paths are the engine's administration, and which requests may be run twice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote_to_bytes

ADMIN_PATHS = frozenset(
    {
        "abort_request",
        "add_external_corpus",
        "attach_hicache_storage_backend",
        "clear_hicache_storage_backend",
        "close_session",
        "configure_logging",
        "continue_generation",
        "destroy_weights_update_group",
        "detach_hicache_storage_backend",
        "dump_expert_distribution_record",
        "dumper",
        "flush_cache",
        "freeze_gc",
        "get_weights_by_name",
        "hicache",
        "init_weights_send_group_for_remote_instance",
        "init_weights_update_group",
        "load_lora_adapter",
        "load_lora_adapter_from_tensors",
        "open_session",
        "pause_generation",
        "pd_role_switch",
        "post_process_weights",
        "release_memory_occupation",
        "remove_external_corpus",
        "resume_memory_occupation",
        "send_weights_to_remote_instance",
        "set_internal_state",
        "slow_down",
        "start_expert_distribution_record",
        "start_profile",
        "stop_expert_distribution_record",
        "stop_profile",
        "unload_lora_adapter",
        "update_weight_version",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
        "weights_checker",
    }
)
"""First segments of the paths by which an SGLang 0.5.23 server is administered (its http_server module)."""

REPEATABLE_PATHS = frozenset(
    {
        "generate",
        "invocations",
        "vertex_generate",
        "api/chat",
        "api/generate",
        "v1/chat/completions",
        "v1/classify",
        "v1/completions",
        "v1/detokenize",
        "v1/embeddings",
        "v1/messages",
        "v1/messages/count_tokens",
        "v1/rerank",
        "v1/responses",
        "v1/score",
        "v1/tokenize",
    }
)
"""Inference: running it twice costs time and changes nothing."""

CONVERSATION_PATHS = REPEATABLE_PATHS - {
    "v1/classify",
    "v1/detokenize",
    "v1/embeddings",
    "v1/rerank",
    "v1/score",
    "v1/tokenize",
}
"""Inference whose prompt may be one turn of many. The others are single shots: there is no session to look for in
their bodies, and remembering each would push real sessions out."""

_REPEATABLE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"PUT", b"DELETE"})
"""Idempotent by RFC 9110, section 9.2.2."""


_ACTIONS = ("cancel", "input_items")
"""What may stand behind a response's id. Anything else may be the id itself, behind slashes that servers fold."""

MAX_CACHED_BYTES = 64
"""Longer targets are not remembered: clients choose them, and thousands of long ones would fill memory."""

_SPACES = "".join(map(chr, range(33)))


@dataclass(frozen=True, slots=True)
class Route:
    """What is to be known of a target."""

    path: str
    """As a server would resolve it: query off, escapes decoded, slashes and dots folded."""
    climbs: bool
    """It leaves its root: behind a base path that would be another service's."""
    admin: bool
    """It is the engine's administration."""
    repeatable: bool
    """Inference, which may be run again though a replica may have begun it, whatever the method."""
    conversation: bool
    """The body may hold a turn of a conversation."""
    turn: bool
    """The engine prefills what the body holds of a conversation, and keeps it."""
    response: str | None
    """Of the responses API: the id in the path, empty where there is none. None: another API."""


def route(target: bytes) -> Route:
    """The same for equal targets but for their queries."""
    path = target.split(b"?", 1)[0]
    return _cached(path) if len(path) <= MAX_CACHED_BYTES else _route(path)


def shown(target: bytes) -> str:
    """The target's path for logs, cut to a length. A response's id is left out: who has it can read the response."""
    path = target.split(b"?", 1)[0][:256].decode("latin-1")
    before, _, rest = path.partition("/responses/")
    if not rest:  # unless it is written otherwise, with an escape or another slash
        return "/v1/responses/{id}" if route(target).response else path
    _, slash, action = rest.partition("/")
    return f"{before}/responses/{{id}}{slash}{action}" if action in _ACTIONS else f"{before}/responses/{{id}}"


def is_repeatable(method: bytes, route: Route) -> bool:
    """Whether the request may be run again though a replica may have begun it."""
    return route.repeatable or method in _REPEATABLE_METHODS


def _route(target: bytes) -> Route:
    path = _normal(target.split(b"#", 1)[0])
    api = _unprefixed(path)
    conversation = api in CONVERSATION_PATHS
    return Route(
        path,
        climbs=_climbs(target),
        admin=_is_admin(path),
        repeatable=api in REPEATABLE_PATHS,
        conversation=conversation,
        turn=conversation and not path.endswith("count_tokens"),
        response=_response(api),
    )


_cached = lru_cache(maxsize=4096)(_route)


def _climbs(target: bytes) -> bool:
    depth = 0
    for segment in unquote_to_bytes(target).replace(b"\\", b"/").split(b"/"):
        if segment == b"..":
            depth -= 1
            if depth < 0:
                return True
        elif segment not in (b"", b"."):
            depth += 1
    return False


def _normal(path: bytes) -> str:
    segments: list[bytes] = []
    for segment in unquote_to_bytes(path).replace(b"\\", b"/").split(b"/"):
        if segment == b"..":
            if segments:
                segments.pop()
        elif segment not in (b"", b"."):
            segments.append(segment)
    return b"/".join(segments).decode("latin-1")


def _is_admin(path: str) -> bool:
    first = path.split("/", 1)[0]
    if first == "v1":
        first = path[3:].split("/", 1)[0]
    # Starlette's routes end in `$`, which matches before a final newline too: `/flush_cache%0a` is `/flush_cache`.
    return first.split(";", 1)[0].strip(_SPACES) in ADMIN_PATHS


def _response(api: str) -> str | None:
    if api == "v1/responses":
        return ""
    return api.split("/")[2] if api.startswith("v1/responses/") else None


def _unprefixed(path: str) -> str:
    """An API under a prefix is the same API."""
    version = path.rfind("/v1/")
    return path[version + 1 :] if version >= 0 else path
