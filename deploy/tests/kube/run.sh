#!/usr/bin/env bash
# Run the cluster tests (deploy/tests/e2e): get etcd, runc and Prometheus, build the test cluster, and start pytest in
# network, mount and process namespaces of its own, so that nothing outlives it. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cache=${BATON_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton-kube}
python=${PYTHON:-$root/.venv/bin/python}

# A missing tool fails the run on the build machine only.
cannot() {
    printf 'test-kube: NOT RUN: %s\n' "$1" >&2
    [ "${CI:-}" = true ] && exit 1
    exit 0
}
[ "$(uname -s)" = Linux ] || cannot "it needs Linux"
[ "$(id -u)" = 0 ] || cannot "it makes namespaces, bridges and containers: run it as root"
command -v go >/dev/null || cannot "it builds Kubernetes: install Go 1.26 or newer (https://go.dev/dl/)"
command -v kubectl >/dev/null || cannot "install kubectl (https://kubernetes.io/docs/tasks/tools/)"
command -v ip >/dev/null || cannot "install iproute2"

mkdir -p "$cache/debian"
for needed in etcd-server:usr/bin/etcd runc:usr/sbin/runc prometheus:usr/bin/prometheus; do
    package=${needed%%:*} program=${needed#*:}
    [ -x "$cache/debian/$program" ] && continue
    command -v apt-get >/dev/null || cannot "it takes $program from Debian's package $package: put it into $cache/debian"
    (
        cd "$cache"
        apt-get download -q "$package" # unpacked here, not installed
        dpkg -x "$package"_*.deb debian
        rm -f "$package"_*.deb
    )
done

echo "test-kube: building Kubernetes; the first time takes 10 to 20 minutes on two cores, later ones seconds"
(cd "$here" && nice -n 19 go build -buildvcs=false -ldflags='-s -w' -o "$cache/kube" .)

echo "test-kube: CRDs of components/monitoring and components/autoscale-keda:"
(cd "$root" && "$python" -m deploy.tests.custom_resources)

export BATON_KUBE_PROGRAMS=$cache
# The router's pods run the image of deploy/docker; where it cannot be built, this machine's files.
echo "test-kube: building the router's image"
BATON_KUBE_ROUTER_ROOTFS=$(cd "$root" && PYTHONPATH=. "$python" -m deploy.tests.images) || BATON_KUBE_ROUTER_ROOTFS=
export BATON_KUBE_ROUTER_ROOTFS
# Each cluster has namespaces of its own. --kill-child ends every process of it with pytest; mounts and links vanish with
# their namespaces.
prepare='
    mount -t tmpfs -o mode=755 tmpfs /run
    mount -t tmpfs -o mode=755 tmpfs /var/log
    mkdir -p /run/netns /run/baton/tmp
    chmod 1777 /run/baton/tmp
    export TMPDIR=/run/baton/tmp
    ip link set lo up
    cd "$1"
    shift
    "$@"
'
cluster=(
    unshare --net --mount --pid --fork --kill-child --mount-proc --propagation private bash -euc "$prepare" - "$root"
    "$python" -m pytest -m kube -p no:cacheprovider
)

status=0
tests=deploy/tests/e2e
case " $* " in
*" -k"* | *"::"* | *.py*) "${cluster[@]}" "$tests" "$@" || status=$? ;; # a choice of tests: one cluster
*) # all of them: most of their time is waiting, so two clusters share the cores
    first=("$tests"/test_{cpu_demo,disruptions,doctor,whole_run}.py)
    second=()
    for path in "$root/$tests"/test_*.py; do
        path=$tests/$(basename "$path")
        [[ " ${first[*]} " == *" $path "* && $path != */test_whole_run.py ]] || second+=("$path")
    done
    log=$(mktemp)
    "${cluster[@]}" "${second[@]}" "$@" >"$log" 2>&1 &
    trap 'kill $! 2>/dev/null' INT TERM
    "${cluster[@]}" "${first[@]}" "$@" || status=$?
    wait $! || status=$?
    echo "test-kube: the second cluster:"
    cat "$log"
    rm -f "$log"
    ;;
esac
# Control groups belong to no namespace: remove those of containers, which are empty by now.
find /sys/fs/cgroup -depth -type d -path '*/baton-kube*' -exec rmdir {} + 2>/dev/null || true
if [ -n "$(find /sys/fs/cgroup -type d -name 'baton-kube*' -print -quit)" ]; then
    echo "test-kube: control groups are left behind" >&2
    exit 1
fi
exit $status
