"""warmroute and its peers on the same work, in one run: HAProxy, nginx, Envoy, SGLang's and vLLM's routers.

Each is started as its own manual says, with one worker where it lets one choose, and hashes or balances over the
same four stand-ins. Every repeat goes through all shapes and all routers before the next begins, so that a slow
minute of the machine meets them all. Prints one Markdown table per shape (medians over the repeats) and writes every
single measurement to `--output` as JSON lines.

    python -m benchmarks.peers --output results.jsonl
    python -m benchmarks.peers direct warmroute haproxy --shapes stream --repeats 5 --output results.jsonl
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.run import PORTS, Router, Row, add_options, check_options, measure
from benchmarks.table import markdown

ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".peers" / "bin"
URLS = [f"http://127.0.0.1:{port}" for port in PORTS]

HAPROXY = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  http-reuse always
  option http-no-delay
frontend f
  bind 127.0.0.1:8101
  default_backend b
backend b
  balance hdr(modal-session-id)
  hash-type consistent
  hash-balance-factor 125
""" + "".join(f"  server s{port} 127.0.0.1:{port}\n" for port in PORTS)

NGINX = """
daemon off;
worker_processes 1;
error_log /dev/null;
pid %(folder)s/nginx.pid;
events { worker_connections 16384; }
http {
  access_log off;
  client_max_body_size 64m;
  client_body_buffer_size 1m;
  client_body_temp_path %(folder)s/nginx-body;
  proxy_temp_path %(folder)s/nginx-proxy;
  upstream replicas {
    hash $http_modal_session_id consistent;
    %(servers)s
    keepalive 256;
  }
  server {
    listen 127.0.0.1:8102;
    location / {
      proxy_pass http://replicas;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 600s;
    }
  }
}
"""

ENVOY = """
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: 8103}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: bench
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: "/"}
                route: {cluster: replicas, timeout: 0s, hash_policy: [{header: {header_name: modal-session-id}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: replicas
    type: STATIC
    lb_policy: RING_HASH
    load_assignment:
      cluster_name: replicas
      endpoints:
      - lb_endpoints:
""" + "".join(
    f"        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}\n"
    for port in PORTS
)


def routers(folder: Path) -> dict[str, Router]:
    """All that can be measured, by name. Writes the configurations that they need into the folder."""
    (folder / "haproxy.cfg").write_text(HAPROXY)
    servers = " ".join(f"server 127.0.0.1:{port};" for port in PORTS)
    (folder / "nginx.conf").write_text(NGINX % {"folder": folder, "servers": servers})
    (folder / "envoy.yaml").write_text(ENVOY)
    envoy = f"{PEERS}/envoy -c {folder}/envoy.yaml --concurrency 1 -l error"
    found = [
        Router("direct", URLS[0]),
        warmroute("warmroute", Path(sys.executable).parent),
        warmroute("warmroute-compiled", Path(".compiled/bin")),
        Router("haproxy", "http://127.0.0.1:8101", ("haproxy", "-f", f"{folder}/haproxy.cfg")),
        Router("nginx", "http://127.0.0.1:8102", (system("nginx"), "-c", f"{folder}/nginx.conf")),
        Router("envoy", "http://127.0.0.1:8103", tuple(envoy.split())),
        _sglang("round_robin", 8104),
        _sglang("cache_aware", 8105),
        _vllm("consistent_hash", 8106),
        _vllm("sticky_least_loaded", 8107),
    ]
    return {router.name: router for router in found}


def warmroute(name: str, folder: Path) -> Router:
    """The one that is installed there, as a user starts it: session affinity, metrics, access log (in `--logs`)."""
    command = [str(folder / "warmroute"), "serve", "--host", "127.0.0.1", "--port", "8100"]
    command += ["--admin-port", "8190", "--policy", "session_affinity"]
    for url in URLS:
        command += ["--replica", url]
    return Router(name, "http://127.0.0.1:8100", tuple(command))


def system(program: str) -> str:
    """Path of a program of the system; Debian's sbin folders are not on every user's PATH."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin") or program


def _sglang(policy: str, port: int) -> Router:
    command = [f"{PEERS}/sglang-router", "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *URLS]
    command += ["--policy", policy, "--log-level", "warn", "--prometheus-port", str(port + 20000)]
    return Router(f"sglang-{policy.replace('_', '-')}", f"http://127.0.0.1:{port}", tuple(command))


def _vllm(policy: str, port: int) -> Router:
    command = [f"{PEERS}/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *URLS]
    command += ["--policy", policy, "--log-level", "warning", "--prometheus-port", str(port + 20000)]
    return Router(f"vllm-{policy.replace('_', '-')}", f"http://127.0.0.1:{port}", tuple(command), "x-session-id")


def main() -> int:
    cli = argparse.ArgumentParser(description="Measure warmroute and its peers in one run.")
    cli.add_argument("names", nargs="*", help="routers to measure; all unless given")
    cli.add_argument("--repeats", type=int, default=3)
    cli.add_argument("--output", type=Path, help="file that gets every measurement as a JSON line")
    add_options(cli)
    args = cli.parse_args()
    check_options(cli, args)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
        known = routers(Path(folder))
        unknown = [name for name in args.names if name not in known]
        if unknown:
            cli.error(f"unknown router {', '.join(unknown)}; known: {', '.join(known)}")
        for repeat in range(args.repeats):
            for shape in args.shapes:
                for name in args.names or known:
                    row = {"repeat": repeat, **measure(known[name], shape, seconds=args.seconds, logs=args.logs)}
                    rows.append(row)
                    _report(row)
                    if args.output:
                        with args.output.open("a") as output:
                            output.write(json.dumps(row) + "\n")
    print(markdown(rows))
    return 1 if any("error" in row for row in rows) else 0


def _report(row: Row) -> None:
    """Progress, on stderr: the table on stdout stays clean."""
    cost = row.get("error") or f"{row['cpu_us_per_request']} us/request, {row.get('cpu_us_per_chunk', '-')} us/chunk"
    print(f"repeat {row['repeat']} {row['shape']:7}{row['name']:26}{cost}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
