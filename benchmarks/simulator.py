"""How fast the simulator is: simulated requests for each second of CPU time, one JSON object a line.

python -m benchmarks.simulator [--scenario N64,int4] [--policies sticky,session_affinity] [--seed 11] [--longer 1]
.compiled/bin/python -P benchmarks/simulator.py ...

The second is the compiled one that `make compiled` has made: as a file, and with -P, so that the sources of the working
folder are not taken for what is installed. Each line says which it was.

The world is built before the clock starts. CPU time, not wall time; still, run it on an otherwise idle machine: cores
that share their units with others' work are slower. `peak_mb` is the process's, from the first run on: to compare it,
let each have a process of its own. `digest` is that of `warmroute sim run`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

from sim import engine, scenario, scenario_file


def measure(name: str, policy: str, seed: int, longer: int) -> dict[str, object]:
    """One run, in which as many times as usual is measured."""
    plan = scenario_file.find(name)
    if longer > 1:
        plan = scenario_file.find(name, {"measured_s": longer * plan.measured_s})
    world = scenario.build(plan, seed, policy, {})
    began = time.process_time()
    world.run(plan.end)
    seconds = time.process_time() - began
    world.close()
    requests = sum(router.balancer.leases for router in world.front.routers)
    return {
        "scenario": name,
        "policy": policy,
        "seed": seed,
        "compiled": not engine.__file__.endswith(".py"),
        "replicas": plan.replicas,
        "simulated_s": plan.end,
        "requests": requests,
        "events": world.engine.calls,
        "cpu_s": round(seconds, 2),
        "requests_per_cpu_s": round(requests / seconds),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "digest": world.measure.digest(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", default="N64,int4", help="names, separated by commas")
    parser.add_argument("--policies", default="sticky,session_affinity", help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--longer", type=int, default=1, help="times the measured part of the scenario")
    given = parser.parse_args()
    for name in given.scenario.split(","):
        for policy in given.policies.split(","):
            print(json.dumps(measure(name, policy, given.seed, given.longer)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
