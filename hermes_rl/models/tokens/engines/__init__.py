"""The wires of engines that take a prompt as token ids and say which ids they sampled."""
