"""FedPC (Cao et al. 2022): a pilot sends its model, the others a cost and a ternary vector.

protocol: a round. parameters: what may be chosen, and how messages are read. worker: what a client does beside
training. ternary: vectors of -1, 0, 1 and their packing. masks: secure aggregation of them. messages: what travels, and
what is refused. evidence: what is known of a victim.
"""
