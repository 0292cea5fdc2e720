# What people and CI run. Each target sets up what it needs in .venv (or a folder of its own) first.
.DEFAULT_GOAL := help
.PHONY: help setup run test lint format lock test-fronts test-dashboards test-chart test-kubernetes test-ui test-engine test-clients test-compiled compiled fuzz soak bench bench-peers bench-placement check-independent dashboards chart pictures licences wheel image release clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

setup: ## Create .venv with pinned dependencies
	@scripts/setup

run: setup ## Start warmroute on 127.0.0.1:8080 before three emulated replicas (or REPLICAS=http://a:30000,http://b:30000)
	@exec .venv/bin/python scripts/run.py

TEST_WORKERS ?= 4
CONTAINERS ?= docker
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

test: setup ## Every test that needs neither engine nor agents nor other proxies, TEST_WORKERS (4) at a time
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not engine and not clients and not fronts and not prometheus and not browser and not chart and not kubernetes"

lint: setup ## Lint, format check and strict types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy --explicit-package-bases benchmarks

format: setup ## Put the code into shape
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

test-fronts: setup ## Tests beside and behind HAProxy, nginx and Envoy (installs them when missing, on Debian or Ubuntu as root)
	scripts/test-fronts

test-dashboards: setup ## Every query of dashboards and alerts, with a real Prometheus (installs it when missing, likewise)
	scripts/test-dashboards

test-chart: setup ## The Helm chart with the real Helm and Kubernetes' schemas (installs them into .helm the first time)
	scripts/test-chart

test-kubernetes: setup ## Router and chart with a real Kubernetes API server (builds it into .kubernetes the first time)
	scripts/test-kubernetes

test-ui: setup ## The live page in Chromium (installs it when missing, likewise)
	scripts/test-ui

test-engine: setup ## Tests with real SGLang servers on the CPU (installs them into .engine the first time)
	scripts/test-engine

test-clients: setup ## Tests with real coding agents (installs them into .clients the first time)
	scripts/test-clients

test-compiled: setup ## Tests of core, data path and simulator as compiled (compiles first, as below)
	scripts/test-compiled

compiled: setup ## warmroute and its simulator with half the CPU, compiled into .compiled (needs a C compiler)
	scripts/compile

fuzz: setup ## Feed the data path hostile bytes for FUZZ_S seconds (600), from case FUZZ_SEED on
	@.venv/bin/python -m tests.fuzz

soak: setup ## Run mixed traffic with failing replicas for SOAK_S seconds (3600), and say what leaked or broke
	@.venv/bin/python -m tests.soak

bench: setup ## Measure warmroute alone
	scripts/bench

bench-peers: setup ## Measure warmroute beside HAProxy, nginx, Envoy and SGLang's and vLLM's routers, in one run
	scripts/bench-peers

bench-placement: setup ## Measure what one placement costs, every policy, 16 to 1,000 replicas
	@.venv/bin/python -m benchmarks.placement

check-independent: setup ## Compare the simulator with NVIDIA Dynamo's mocker (installs it into .dynamo the first time)
	scripts/check-independent

lock: setup ## Pin dependencies anew into requirements/
	scripts/lock

dashboards: setup ## Write deploy/dashboards/*.json anew, and draw their pictures for the documents from a watched run
	.venv/bin/python -m deploy.dashboards
	scripts/need prometheus
	.venv/bin/python -m tests.deploy.pictures

chart: setup ## Write what of the Helm chart is made from elsewhere: schema, table of values, version, alerts, dashboards
	.venv/bin/python -m deploy.chart

pictures: setup ## Take pictures of the live page for the documents, before emulated replicas under load
	scripts/need chromium
	.venv/bin/python -m tests.ui.pictures

licences: setup ## Write docs/licences.md anew
	.venv/bin/python scripts/licences.py

wheel: setup ## Build wheel and sdist into dist/
	.venv/bin/python -m build --no-isolation

image: ## Build the container image (needs Docker 23 or newer; CONTAINERS=podman for Podman)
	$(CONTAINERS) build --file deploy/image/Dockerfile --build-arg REVISION="$$(git rev-parse HEAD)" --tag warmroute:$(VERSION) .

release: setup ## Build, try and describe what is released into dist/: wheel, sdist, SBOM and checksums
	@.venv/bin/python scripts/release.py

clean: ## Remove everything that make has made
	rm -rf .venv .compiled .engine .clients .peers .dynamo .fronts .helm .kubernetes dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
