"""Replicas that step alone and do not stop when another one is lost (`replicas.membership: elastic`).

Every replica is a run of its own: S processes with a process group, checkpoints, logs and saved weights of their own.
Nothing that all processes must call spans two replicas. Between two exchanges they do not know of each other. At an
exchange every process sends one message to the membership server, and waits for one answer. The server is a process
beside the launcher; or `thinwire server`, if each replica has a launcher on a host of its own. Either way it is the
same program, over the same encrypted mesh (`pipeline/processes/zeromq/`).

    process i of replica r     deliver: the frames of its stages; the samples since the last exchange
    membership server          waits, decides once who takes part, answers all of them
    process i of replica r     the frames of process i of every replica that takes part; or other weights to take

**Who takes part** is decided in one place, at one moment, for all stages: when every replica that trains has delivered
everything, or `wire.timeout` after the first one has. A replica takes part if all its processes had delivered then. The
server has all frames before it decides, so those who take part get the same set and the same bytes. They add up
in the order of the replicas, weighted by samples, and so hold the same bits. Each sends the digest of its weights after
the exchange; a difference stops the run.

**Who is lost**: the launcher sees a process of a replica end, or its silence, and stops the rest of that replica alone.
On several hosts, a launcher that is silent is lost with its replica.

| it is lost | then |
|---|---|
| before it has delivered everything | The exchange goes on without it, at once |
| when it has delivered, and others have not | Its frames are dropped: it may go on from an older checkpoint |
| after the exchange was decided | Its frames count for all who took part, so they hold the same bits |
| while it gives its weights to another | The other one waits for the next exchange, and another replica gives |
| while it takes weights | It is lost, and returns once more |
| after the last exchange | It takes the weights of the end, which all give and the server keeps |

**Who returns** says which common weights its checkpoint has: the step of their exchange, and their digest. If they are
the current ones, it goes on from its checkpoint, exactly. Otherwise it waits for the next exchange, and takes the
common weights, the outer momentum and the step of a replica that took part. Its optimizer and the buffers of its
boundaries are those of its checkpoint, or new. Its errors of `replicas.gradients` begin as zeros, because a part of
older ones has been sent since. A late replica, which delivers after the decision, does the same; what it moved is
dropped.

**If no replica trains**, as at the start, the newest common weights that any of them has become the current ones, once
all have sent theirs or `wire.timeout` is over. So a run of which all replicas died goes on as one that was stopped. If
those weights are of the end, their replica gives them at once: it ends, and nobody could ask it later.

**The server** keeps nothing on a disk and counts on nothing that a replica could not say again. If it dies or
is stopped, the launcher starts all replicas again, and this rule applies.

    rules       who takes part, who goes on, who takes weights: a state machine without sockets
    messages    their form and their fields, checked where they arrive
    server      who is there and who may come, around the rules; `listening` is the same on a mesh
    client      the connection of a process to the server; the process listens nowhere
    attendance  what a stage process sends, and what it gets
    mail        the frames of one exchange
    steps       steps between two exchanges, and the exchange, as the trainer calls them
"""
