"""What posttrain gets from mathcheck: the verifiers `math` and `number`, and the tool `calculator`."""
