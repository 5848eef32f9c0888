# Thin: the work is in .ci/setup.sh and the tools themselves. `make run ARGS="--prefill 2 --decode 2"` passes flags on.
.PHONY: help setup wheel run smoke test test-all test-deploy test-kube bench lint audit lock
py := .venv/bin/
# Tests and nodes are hundreds of processes that import the same modules: their bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE
# Tests of Rust mostly wait, for timeouts and for pauses of their own.
export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(nproc))

# .ci/run has another one, for the same lints.
CLIPPY = cargo clippy --locked --workspace --all-targets --quiet -- -D warnings

help:      ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12
setup:     ## .venv with locked packages and the native extension; a no-op when nothing changed
	@.ci/setup.sh
wheel:     ## one wheel in dist/, for any machine of this kind: README.md, Install
	@.ci/wheel.sh
run: setup ## the local cluster: router + prefill node + decode node with the demo model
	@$(py)baton up $(ARGS)
smoke: setup ## start the cluster, send real requests through it, stop; exit code says whether all was well
	@$(py)baton up --smoke $(ARGS)
test: setup ## every test that needs no GPU, except the slow ones
	cargo test --locked --workspace --quiet
	$(py)pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not gpu and not kube" $(ARGS)
test-all: export BATON_TEST_EFFORT = all
test-all: setup ## the slow ones too, and all examples of property tests
	@tests/clients/setup.sh
	cargo test --locked --workspace --quiet
	$(py)pytest -n auto --maxprocesses 4 --dist loadfile -m "not gpu and not kube" $(ARGS)
	@deploy/tests/kube/run.sh
test-deploy: setup ## manifests, rules and dashboards: schemas, references, flags, ports, promtool; no cluster (part of test)
	$(py)pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not kube" deploy/tests $(ARGS)
test-kube: setup ## the manifests on a Kubernetes built from Go modules, with real router and engines (part of test-all)
	@deploy/tests/kube/run.sh $(ARGS)
bench: export NATIVE_PROFILE = dist
bench: setup ## ratios of interleaved arms, the quick ones; the long ones and all results: docs/benchmarks.md
	$(py)python -W ignore -m tests.perf.bench_engine
	cargo bench --locked --quiet -p baton-kv-transfer --bench transfer
	$(py)python -m tests.perf.bench_kernels
	$(py)python -W ignore -m tests.perf.bench_experts
	$(py)python -W ignore -m tests.perf.bench_quantized
	$(py)python -W ignore -m tests.perf.bench_speculation --rounds 2
	$(py)python -W ignore -m tests.perf.bench_sched
	$(py)python -W ignore -m tests.perf.grammars.bench_masks --rounds 5
	$(py)python -m tests.perf.bench_front --rounds 1
	$(py)python -m tests.perf.bench_hot --rounds 1 --concurrency 48
	$(py)python -m tests.perf.bench_routing --limit 600 --arms cost,cache_aware,round_robin
	cargo bench --locked --quiet -p baton-router --bench cpu_per_request
lint: setup ## formatters, linters, types, imports, spelling, structure of the sources and its figures
	cargo fmt --all --check
	$(CLIPPY)
	$(py)ruff check
	$(py)ruff format --check
	$(py)mypy
	$(py)lint-imports --no-cache
	$(py)typos
	$(py)pytest -q tests/structure tests/unit/repository/test_prose_names.py
	$(py)python -m tests.structure
audit: setup ## known weaknesses of locked crates and packages; needs the network (not part of lint or test)
	@.ci/audit.sh
lock:      ## resolve engine/requirements*.lock from pyproject.toml again
	@.ci/lock.sh
