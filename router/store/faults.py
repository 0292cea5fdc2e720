"""What Redis says when it does not do its work, in words that name the remedy."""

from __future__ import annotations

ACL = (
    "~PREFIX:* +evalsha +eval +time +hgetall +hset +hdel +hlen +hexists +pexpire "
    "+xadd +xread +xrevrange +xtrim +set +get"
)
"""All that a user needs, with the prefix in place."""
ACL_CLUSTER = "+cluster|slots +command"
"""In a cluster besides."""

_RIGHTS = "its user may not do what is needed: give it `{acl}`"
_FAULTS = (
    ("store.password_file", "its password cannot be read"),
    ("NOPERM", _RIGHTS),
    ("no permissions", _RIGHTS),
    ("can't run this command", _RIGHTS),
    ("NOAUTH", "it asks for a password: set store.password_file or store.password"),
    ("WRONGPASS", "it refuses user and password: correct store.username and store.password"),
    ("invalid username-password", "it refuses user and password: correct store.username and store.password"),
    ("invalid password", "it refuses the password: correct store.password"),
    ("without any password configured", "it has no password: leave store.password out, or set one there"),
    ("OOM", "its memory is full: raise its maxmemory, with maxmemory-policy volatile-lru"),
    ("READONLY", "it is a replica, which takes no writes: name the primary, or its Sentinels"),
    ("now a slave", "it has become a replica, which takes no writes: it is looked for anew"),
    ("MASTERDOWN", "it is a replica that has lost its primary: look at that"),
    ("LOADING", "it is still loading its data: nothing to do but to wait"),
    ("MISCONF", "it cannot save to disk and so takes no writes: mend its disk, or set save '' there: it need not save"),
    ("CLUSTERDOWN", "some of its slots are served by nobody: see CLUSTER INFO there"),
    ("not covered", "some of its slots are served by nobody: see CLUSTER INFO there"),
    ("MOVED", "it is a node of a cluster: write store.url as redis+cluster://..."),
    ("Cluster mode is not enabled", "it is no node of a cluster: write store.url as redis://..."),
    ("No master found", "no Sentinel knows a living primary of that name: see SENTINEL MASTERS there"),
    ("WRONGTYPE", "something else has keys of these names: choose another store.prefix"),
    ("max number of clients", "it has too many clients: raise its maxclients"),
    ("DENIED", "it is in protected mode: set a password there, and store.password"),
    ("unknown command", "it is older than is needed: use Redis 6.2, Valkey 7.2 or newer"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted: set store.ca_file to its authority"),
    ("SSL", "TLS fails: see store.ca_file, cert_file, key_file"),
    (
        "Timeout",
        "it does not answer: see whether it runs and can be reached, and speaks TLS where store.url is rediss://",
    ),
    ("Connection closed by server", "it closed the connection: see its log; with TLS store.url is rediss://..."),
    ("handler is closed", "it closed the connection, or something on the way did: see its log"),
    ("Connect", "it cannot be reached: see whether it runs there"),
)
"""What its words hold, and the remedy: the first that fits."""


def described(url: str, prefix: str, words: str) -> str:
    """One line on what went wrong and what to do."""
    words = " ".join(words.split())[:300]
    for sign, remedy in _FAULTS:
        if sign in words:
            return f"{url}: {remedy.format(acl=ACL.replace('PREFIX', prefix))} ({words})"
    return f"{url}: {words}: see its log"
