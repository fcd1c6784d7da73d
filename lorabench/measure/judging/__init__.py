"""Whether an arm computes what plain PEFT computes: what is compared, and by which limits.

The gate, before anything is timed, is `numerics` (with `gold_cache`, which keeps what is computed once a sweep). What
was timed is seen by `witness` in a seat's process and held together by `certificate` in the sweep's own; `depth_noise`
says how far two right runs are apart. `limits` is the one table of what may be off by how much.
"""
