# What people and CI run. Each target sets up what it needs in .venv (or a folder of its own) first.
.DEFAULT_GOAL := help
.PHONY: help setup run test lint format lock test-haproxy test-engine test-clients bench bench-peers bench-placement wheel clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Create .venv with pinned dependencies
	@scripts/setup

run: setup ## Start warmroute on 127.0.0.1:8080 before three emulated replicas (or REPLICAS=http://a:30000,http://b:30000)
	@exec .venv/bin/python scripts/run.py

test: setup ## Every test that needs neither engine nor agents nor HAProxy
	.venv/bin/python -m pytest -m "not engine and not clients and not haproxy"

lint: setup ## Lint, format check and strict types
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy --explicit-package-bases benchmarks

format: setup ## Put the code into shape
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

test-haproxy: setup ## Tests beside HAProxy (installs it when missing, on Debian or Ubuntu as root)
	scripts/test-haproxy

test-engine: setup ## Tests with two real SGLang servers on the CPU (installs them into .engine the first time)
	scripts/test-engine

test-clients: setup ## Tests with real coding agents (installs them into .clients the first time)
	scripts/test-clients

bench: setup ## Measure warmroute alone
	scripts/bench

bench-peers: setup ## Measure warmroute beside HAProxy, nginx, Envoy and SGLang's and vLLM's routers, in one run
	scripts/bench-peers

bench-placement: setup ## Measure what one placement costs, every policy, 16 to 1,000 replicas
	@.venv/bin/python -m benchmarks.placement

lock: setup ## Pin dependencies anew into requirements/lock.txt
	scripts/lock

wheel: setup ## Build wheel and sdist into dist/
	.venv/bin/python -m build --no-isolation

clean: ## Remove everything that make has made
	rm -rf .venv .engine .clients .peers dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
