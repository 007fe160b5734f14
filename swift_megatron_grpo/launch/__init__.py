"""Start the roles of a run: ranks and rollout servers, on Ray or as processes of the machines of a job.

`megatron rlhf --config FILE` becomes this folder's command if the file has roles (`train`, `rollout`) or asks for Ray.
The trainer and the servers know nothing of it: each is a command with the flags and the environment that a user would
give it.

__main__.py         the command: reads the file, starts the roles, and prints the last line
roles.py            which GPUs train and generate, and the flags of each
safe_yaml.py        reads YAML whose aliases are bounded
member.py           what the ranks of a machine and a server have in common
child.py            a member that is a process of this machine
commands.py         the commands of torchrun and of a server
capacity.py         refuses roles that do not fit on a cluster
start.py            gives the members addresses and starts them
supervision.py      watches the members, and ends all of them together
on_ray.py           members as actors of Ray, in a placement group; the only file that imports ray
devices.py          the GPUs of this machine
on_this_machine.py  members as processes of this machine
on_machines.py      members as processes of several machines, each of which runs the same command

Tested by tests/unit/launch and tests/e2e/test_roles.py.
"""
