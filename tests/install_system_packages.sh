#!/bin/sh
# Install what the tests need beyond Python: a Slurm to submit to, an sshd to log in to, pdsh, a FUSE
# file system that caches, and a browser to look at a page with.
#
# Run by `make test`. Does nothing, at once, where everything is there. Installs with apt-get where
# it may (root on Debian or Ubuntu). Anywhere else it says what is missing and succeeds: the tests
# that need a missing program are skipped, and their reasons name it. No service of the system is
# started or enabled: the tests start private daemons, on loopback, in temporary directories.
set -eu

# program:package, with Debian's names.
wanted='slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge sshd:openssh-server
        ssh:openssh-client pdsh:pdsh setpriv:util-linux bindfs:bindfs'

# Ubuntu has Chromium as a snap only, and one package that is not known would keep out all others.
if grep -qs '^ID=debian$' /etc/os-release; then
    wanted="$wanted chromium:chromium"
fi

# sshd, slurmd and munged live in sbin, which an ordinary user's PATH need not have.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing_packages() {
    for pair in $wanted; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || printf '%s\n' "${pair##*:}"
    done
}

packages=$(missing_packages | tr '\n' ' ')
[ -n "$packages" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "install_system_packages: not installed: $packages" >&2
    echo "  Tests that need them will be skipped. To run those, on Debian or Ubuntu:" >&2
    echo "  sudo apt-get install --no-install-recommends $packages" >&2
    exit 0
fi

# Debian starts a daemon when its package is installed unless policy-rc.d forbids it. The file is
# ours only while apt-get runs, and never replaces one that an administrator put there.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

install() {
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages
}

echo "install_system_packages: installing $packages" >&2
# The package lists may be absent (a fresh container) or stale: one update, and only then.
if ! install; then
    apt-get update -q
    install
fi

# ... and enables it for the next boot, too. What we installed for tests must not listen tomorrow.
# (Without systemd nothing starts at boot, and names without such a unit are ignored.)
for package in $packages; do
    case $package in
        openssh-server) unit=ssh ;;
        *) unit=$package ;;
    esac
    systemctl disable "$unit.service" >/dev/null 2>&1 || true
done

packages=$(missing_packages | tr '\n' ' ')
if [ -n "$packages" ]; then
    echo "install_system_packages: apt-get succeeded, yet these are missing: $packages" >&2
    exit 1
fi
