#!/usr/bin/env bash
# Installs what Quartet needs on Debian or Ubuntu and says what it installs.
# Usage: tools/install.sh build|lab|test
#   build  Go, to compile the binaries
#   lab    build, and the routers and tools of the lab
#   test   lab, and the second router, the BPF compiler and the linters' needs
set -euo pipefail

go_version=1.26.8

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
die() { printf 'install: %s\n' "$*" >&2; exit 1; }

case "${1:-}" in
	build) packages=(ca-certificates git make) ;;
	lab) packages=(ca-certificates git make bird2 ethtool iproute2 nftables) ;;
	test) packages=(ca-certificates git make bird2 ethtool iproute2 nftables
		frr clang-19 clang-format-19 llvm-19 linux-libc-dev
		iputils-ping procps util-linux) ;;
	*) die "unknown set \"${1:-}\": build, lab or test" ;;
esac
command -v apt-get >/dev/null || die "this is not Debian or Ubuntu (no apt-get): install ${packages[*]} and Go $go_version by hand"

missing=()
for p in "${packages[@]}"; do
	[ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null)" = installed ] || missing+=("$p")
done

tools=$(cd "$(dirname "$0")/.." && pwd)/bin/tools
go_is_new() { # GO: is it at least 1.26?
	[ "$(printf '%s\n' 1.26 "$("$1" env GOVERSION 2>/dev/null | sed 's/^go//')" | sort -V | head -n 1)" = 1.26 ]
}
bootstrap=
if ! { command -v go >/dev/null && go_is_new go; } && ! [ -x "$tools/go/bin/go" ]; then
	bootstrap=yes
	command -v go >/dev/null || missing+=(golang-go)
fi

if [ ${#missing[@]} -gt 0 ]; then
	[ "$(id -u)" = 0 ] || die "run as root to install: ${missing[*]}"
	say "installing packages: ${missing[*]}"
	export DEBIAN_FRONTEND=noninteractive
	# A package's service must not start: the lab runs its own routers in namespaces.
	policy=/usr/sbin/policy-rc.d
	made_policy=
	if ! [ -e $policy ]; then
		printf '#!/bin/sh\nexit 101\n' >$policy
		chmod +x $policy
		made_policy=yes
	fi
	trap '[ -z "$made_policy" ] || rm -f $policy' EXIT
	apt-get update -qq || die "apt-get update failed: see above"
	apt-get install -y -qq --no-install-recommends "${missing[@]}" >/tmp/quartet-install.log 2>&1 ||
		{ tail -n 20 /tmp/quartet-install.log >&2; die "apt-get install failed: full log in /tmp/quartet-install.log"; }
fi

if [ -n "$bootstrap" ]; then
	case "$(uname -m)" in
		x86_64) arch=amd64 ;;
		aarch64) arch=arm64 ;;
		*) die "no Go toolchain for $(uname -m): install Go $go_version by hand" ;;
	esac
	say "installing Go $go_version as a Go module into ${tools#"$PWD"/}/go (the packaged $(go version | cut -d' ' -f3) is too old)"
	mkdir -p "$tools"
	answer=$(cd "$tools" && GO111MODULE=on GOFLAGS=-modcacherw GOTOOLCHAIN=local \
		go mod download -json "golang.org/toolchain@v0.0.1-go$go_version.linux-$arch" 2>&1) ||
		die "download Go $go_version: $answer"
	dir=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' <<<"$answer")
	[ -d "$dir" ] || die "download Go $go_version: $answer"
	rm -rf "$tools/go"
	cp -r "$dir" "$tools/go"
	chmod -R u+w "$tools/go"
	chmod +x "$tools/go/bin/"* "$tools/go/pkg/tool/linux_$arch/"* 2>/dev/null || true
	"$tools/go/bin/go" version >/dev/null || die "the downloaded Go does not run"
fi
