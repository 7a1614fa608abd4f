"""Plans meet live processes: bind, agree, execute.

1. *bind*: `bind_trainer` and `bind_worker` compare what a process holds with what the plan
   assumes, and make every view and buffer that a sync needs;
2. *agree*: over a control plane, in phases, before any data moves;
3. *execute*: `Trainer.send` and `Worker.receive` run the plan's transfers in its order, over
   a transport.
"""
