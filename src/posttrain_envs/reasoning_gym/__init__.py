"""The problems of the library reasoning-gym, and its scorers, of which none is believed unchecked."""
