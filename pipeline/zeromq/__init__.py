"""A process group over ZeroMQ: encrypted with keys that every process of a run holds, and whole after a broken link.

ZeroMQ moves, encrypts and reconnects; what it loses with a connection is sent again by what is here.

    keys      the pair of keys of a run, and its file
    packets   what travels: its form, in bytes
    flows     sequence numbers at both ends of a flow of packets: what is acknowledged, and what is sent again
    messages  packets put together to messages, which posted receives take
    links     one connection to one process: a socket as long as it lasts, then another one
    network   the thread that owns all sockets of a process
    group     the process group, as torch sees it

Nothing here is imported unless `wire.transport` is zmq, because pyzmq is an extra.
"""
