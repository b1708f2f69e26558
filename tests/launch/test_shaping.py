"""The commands that make a network, as literal tables; whether kernels obey them is for test_hosts.py."""

import pytest

from thinwire.launch.hosts.shaping import creation, egress, kinds, shaping, unshaping
from thinwire.launch.shared.links import Links


def lines(commands):
    return [" ".join(command) for command in commands]


def test_two_hosts_and_a_switch():
    assert lines(creation("c", 2)) == [
        "ip netns add c-switch",
        "ip -n c-switch link add bridge type bridge",
        "ip -n c-switch link set bridge up",
        "ip netns add c-0",
        "ip -n c-0 link add wire type veth peer name port0 netns c-switch",
        "ip -n c-switch link set port0 master bridge up",
        "ip -n c-0 addr add 10.0.0.1/24 dev wire",
        "ip -n c-0 link set lo up",
        "ip -n c-0 link set wire up",
        "ip netns add c-1",
        "ip -n c-1 link add wire type veth peer name port1 netns c-switch",
        "ip -n c-switch link set port1 master bridge up",
        "ip -n c-1 addr add 10.0.0.2/24 dev wire",
        "ip -n c-1 link set lo up",
        "ip -n c-1 link set wire up",
    ]


BUCKET = "tbf rate 100000000bit burst 4000b latency 400ms"


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (Links(), []),
        (
            Links(bandwidth=100),
            [
                f"tc -n c-0 qdisc add dev wire root handle 1: {BUCKET}",
                f"tc -n c-switch qdisc add dev port0 root handle 1: {BUCKET}",
                f"tc -n c-1 qdisc add dev wire root handle 1: {BUCKET}",
                f"tc -n c-switch qdisc add dev port1 root handle 1: {BUCKET}",
            ],
        ),
        # (20 + 400) ms of 100 Mbit/s are 3468 packets
        (
            Links(num_hosts=1, bandwidth=100, latency=20, loss=0.01),
            [
                f"tc -n c-0 qdisc add dev wire root handle 1: {BUCKET}",
                "tc -n c-0 qdisc add dev wire parent 1: handle 2: netem limit 3468 delay 20000us loss 1%",
                f"tc -n c-switch qdisc add dev port0 root handle 1: {BUCKET}",
            ],
        ),
        (
            Links(num_hosts=1, latency=0.5),
            ["tc -n c-0 qdisc add dev wire root handle 1: netem limit 100000 delay 500us"],
        ),
        # one direction of one link: a class at its sender and one at its receiver
        (
            Links(bandwidth=100, overrides={(0, 1): 1000}),
            [
                "tc -n c-0 qdisc add dev wire root handle 1: htb default 1",
                "tc -n c-0 class add dev wire parent 1: classid 1:1 htb rate 100gbit quantum 60000",
                f"tc -n c-0 qdisc add dev wire parent 1:1 handle 10: {BUCKET}",
                "tc -n c-0 class add dev wire parent 1: classid 1:2 htb rate 100gbit quantum 60000",
                "tc -n c-0 filter add dev wire parent 1: protocol ip prio 1 u32 match ip dst 10.0.0.2/32 flowid 1:2",
                "tc -n c-0 qdisc add dev wire parent 1:2 handle 20: tbf rate 1000000000bit burst 25000b latency 400ms",
                f"tc -n c-switch qdisc add dev port0 root handle 1: {BUCKET}",
                f"tc -n c-1 qdisc add dev wire root handle 1: {BUCKET}",
                "tc -n c-switch qdisc add dev port1 root handle 1: htb default 1",
                "tc -n c-switch class add dev port1 parent 1: classid 1:1 htb rate 100gbit quantum 60000",
                f"tc -n c-switch qdisc add dev port1 parent 1:1 handle 10: {BUCKET}",
                "tc -n c-switch class add dev port1 parent 1: classid 1:2 htb rate 100gbit quantum 60000",
                "tc -n c-switch filter add dev port1 parent 1: protocol ip prio 1 u32 match ip src 10.0.0.1/32 "
                "flowid 1:2",
                "tc -n c-switch qdisc add dev port1 parent 1:2 handle 20: tbf rate 1000000000bit burst 25000b "
                "latency 400ms",
            ],
        ),
    ],
)
def test_what_shapes_the_links(links, expected):
    assert lines(shaping("c", links)) == expected


def test_a_container_shapes_what_it_sends():
    assert egress("eth0", Links(num_hosts=1)) == []
    assert lines(egress("eth0", Links(num_hosts=1, bandwidth=100, loss=0.01))) == [
        f"tc qdisc add dev eth0 root handle 1: {BUCKET}",
        "tc qdisc add dev eth0 parent 1: handle 2: netem limit 3303 delay 0us loss 1%",
    ]


def test_undoing_names_each_shaped_device_once():
    assert unshaping("c", Links()) == []
    assert lines(unshaping("c", Links(num_hosts=1, bandwidth=100, latency=20))) == [
        "tc -n c-0 qdisc del dev wire root",
        "tc -n c-switch qdisc del dev port0 root",
    ]


@pytest.mark.parametrize(
    ("links", "names"),
    [
        (Links(), []),
        (Links(bandwidth=1), ["tbf"]),
        (Links(overrides={(0, 1): None}), ["htb"]),
        (Links(overrides={(0, 1): 1.0}), ["tbf", "htb"]),
        (Links(latency=1), ["netem"]),
        (Links(loss=0.1), ["netem"]),
    ],
)
def test_what_the_kernel_must_have(links, names):
    assert [kind.split()[0] for kind in kinds(links)] == names
