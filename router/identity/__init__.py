"""Whose request it is: session, agent, parent and conversation, from headers and, when needed, the body.

    rules = IdentityRules(parse_rules(config), secret)
    identity = rules.from_headers(headers)                      # at the end of the head
    identity = rules.from_body(identity, body, content_type)    # only when that is needed

Decided once for the whole router:

- A key is a keyed digest of the session's value alone, not of the name of the field it came in: clients send one
  id under several names, and the same session must meet at one home whichever of them got through.
- Where an agent inside the session is named, the key is of both. Subagents of the agents measured share neither the
  parent's tools nor, mostly, its system prompt, and one key for all of them would be a session with many forks.
- A request that names nothing is known by how its conversation begins (see `fingerprint`), within one model and
  one credential: two users who paste the same prompt are two sessions.
- A name of an end user is not a session: it covers many. It only narrows what the conversation's beginning says.
- Names that change with every request or turn are never keys: `x-client-request-id` (a thread in two clients, a
  request in others), `x-request-id`, `x-correlation-id`, `previous_response_id`.
"""

from router.identity import responses
from router.identity.fingerprint import chain
from router.identity.identity import CREDENTIALS, Identity, IdentityRules, is_json
from router.identity.model import model_of
from router.identity.rules import DEFAULT_RULES, BodyRule, HeaderRule, Rule, parse_rules

__all__ = [
    "CREDENTIALS",
    "DEFAULT_RULES",
    "BodyRule",
    "HeaderRule",
    "Identity",
    "IdentityRules",
    "Rule",
    "chain",
    "is_json",
    "model_of",
    "parse_rules",
    "responses",
]
