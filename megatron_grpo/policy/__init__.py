"""The sharded model in training: built by `model`, run by `pipeline`, moved by `optimizer`, offered to the loop by `policy`."""
