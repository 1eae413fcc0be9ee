"""THL: carries rollouts between vocabularies, in coordinates of bytes."""
