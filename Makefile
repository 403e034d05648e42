# `make help` lists the targets. Everything runs as root on Debian or Ubuntu.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The packaged Go may be too old; tools/install.sh then puts one here.
export PATH := $(CURDIR)/bin/tools/go/bin:$(PATH)
export CGO_ENABLED := 0

version := $(shell git describe --always --dirty --tags 2>/dev/null || echo unknown)
ldflags := -X github.com/quartet-lb/quartet/daemon.version=$(version)
tools := $(CURDIR)/bin/tools
say := @printf '\033[1m==>\033[0m %s\n'

.PHONY: build demo test check generate bench lab-up lab-down clean help
.PHONY: dev-packages

build: ## compile the binaries into bin/
	@tools/install.sh build
	$(say) "compiling into bin/ (the first time fetches Go modules and takes about two minutes)"
	@go build -trimpath -ldflags '$(ldflags)' -o bin/ ./cmd/...
	@ls bin | grep -v '^tools$$' | sed 's|^|    bin/|'

demo: ## install what is missing, build, raise the lab, break things, show what happened
	@tools/install.sh lab
	@$(MAKE) --no-print-directory build
	@bin/quartet lab run demo --keep

test: ## install what is missing, then check and run every test
	@$(MAKE) --no-print-directory check
	$(say) "tests: packages, packets, daemons with real routers (about five minutes)"
	@go test -timeout 20m -p 2 $$(go list ./... | grep -v '/quartet/lab$$')
	$(say) "tests: the lab from end to end, by itself (about five minutes)"
	@go test -timeout 20m -v ./lab | tools/progress.sh

check: dev-packages $(tools)/golangci-lint $(tools)/buf ## formatting, lint, import rules, freshness of generated files
	$(say) "check: C and Go formatting, lint"
	@clang-format-19 --dry-run --Werror $$(git ls-files '*.c' '*.h' ':!bpf/libbpf')
	@$(tools)/golangci-lint run ./...
	$(say) "check: import rules, package sentences, licences"
	@go test -count=1 .
	$(say) "check: generated files are fresh"
	@tools/fresh.sh

generate: dev-packages $(tools)/buf ## regenerate the API code and the BPF objects (clang 19)
	$(say) "generate: api"
	@PATH=$(tools):$$PATH buf lint && PATH=$(tools):$$PATH buf generate
	$(say) "generate: BPF objects"
	@go generate ./...

bench: build ## ns per packet of the mux's program, beside Katran's published figures
	@bin/quartet bench mux

lab-up: ## raise the lab and leave it running
	@tools/install.sh lab
	@$(MAKE) --no-print-directory build
	@bin/quartet lab up

lab-down: ## take the lab down
	@bin/quartet lab down

clean: ## remove what was built (the lab is taken down first if it runs)
	@if [ -x bin/quartet ]; then bin/quartet lab down; fi
	@rm -rf bin

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

dev-packages:
	@tools/install.sh test

$(tools)/golangci-lint: tools/lint/go.sum | dev-packages
	$(say) "building golangci-lint (about three minutes, once)"
	@mkdir -p $(tools) && cd tools/lint && go build -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@

$(tools)/buf: tools/go.sum | dev-packages
	$(say) "building buf and the protobuf generators (about two minutes, once)"
	@mkdir -p $(tools) && cd tools && go build -o $(tools)/ github.com/bufbuild/buf/cmd/buf \
		google.golang.org/protobuf/cmd/protoc-gen-go connectrpc.com/connect/cmd/protoc-gen-connect-go
	@touch $@
