"""THL: transfers rollouts between vocabularies, aligned by their bytes."""
