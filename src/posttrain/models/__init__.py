"""What a network is: found, checked, loaded, made, written."""
