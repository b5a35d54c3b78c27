#!/bin/bash
# PID 1 of the node, in namespaces of its own: mount, net, pid, uts, ipc, cgroup. Started inside of the node's cgroup.
# Reads from the environment: RUN_DIR, NODE_NAME, NODE_IP, CGROUP_LEAVES, CGROUP_MOUNTS.
set -euo pipefail

case ${1:-cgroup} in
cgroup)
    # The cgroup namespace first: its root is where this process is, and pods are to live beside the leaf, not below it.
    exec unshare --cgroup bash "$0" namespaces
    ;;
namespaces)
    for leaf in $CGROUP_LEAVES; do echo $$ > "$leaf/cgroup.procs"; done
    exec unshare --mount --net --pid --uts --ipc --fork --kill-child=SIGKILL bash "$0" node
    ;;
esac

# Private, so nothing that is mounted here is seen outside; then shared again, as kubelet's mount propagation needs it.
mount --make-rprivate /
mount --make-rshared /
mount -t proc proc /proc

umount -R /sys/fs/cgroup
[[ $CGROUP_MOUNTS == .=* ]] || mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
for entry in $CGROUP_MOUNTS; do
    name=${entry%%=*} kind=${entry#*=}
    type=${kind%%:*} options=${kind#*:}
    mkdir -p "/sys/fs/cgroup/$name"
    mount -t "$type" ${options:+-o "$options"} "$type" "/sys/fs/cgroup/$name"
    # Controllers that share a mount (cpu,cpuacct) are looked for under each of their names.
    if [[ $name == *,* ]]; then for one in ${name//,/ }; do ln -s "$name" "/sys/fs/cgroup/$one"; done; fi
done
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
        echo "+$controller" > /sys/fs/cgroup/cgroup.subtree_control || echo "controller $controller cannot be handed down" >&2
    done
fi

# kubelet writes these and they have no namespace: files of our own in their place, so the machine keeps its values.
mkdir -p "$RUN_DIR/sysctl"
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    path=${setting%=*}
    echo "${setting#*=}" > "$RUN_DIR/sysctl/${path//\//-}"
    mount --bind "$RUN_DIR/sysctl/${path//\//-}" "/proc/sys/$path"
done

mount -t tmpfs tmpfs /run
mkdir -p /run/lock
printf '127.0.0.1 localhost\n%s %s\n' "$NODE_IP" "$NODE_NAME" > "$RUN_DIR/hosts"
# The cluster's own DNS, so that a test inside of the node calls a Service by its name, as a pod does.
printf 'nameserver 10.96.0.10\nsearch svc.cluster.local cluster.local\noptions ndots:5 timeout:1\n' > "$RUN_DIR/resolv.conf"
mount --bind "$RUN_DIR/hosts" /etc/hosts
resolv=$(readlink -f /etc/resolv.conf)
mkdir -p "$(dirname "$resolv")"
touch "$resolv"
mount --bind "$RUN_DIR/resolv.conf" "$resolv"

hostname "$NODE_NAME"
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1
# A bridge, as there may be no dummy device; and no uplink: nothing can leave the node, nothing can reach it.
ip link add node0 type bridge
ip addr add "$NODE_IP/24" dev node0
ip link set node0 up
ip route add default dev node0

touch "$RUN_DIR/ready"
exec "$RUN_DIR/pause"
