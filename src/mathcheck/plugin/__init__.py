"""What posttrain registers: the verifiers math and number, and the tool calculator."""
