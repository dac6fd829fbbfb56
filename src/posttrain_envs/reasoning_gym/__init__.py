"""Problems of the library reasoning-gym and its scorers, whose verdicts are checked."""
