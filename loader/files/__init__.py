"""Files of this machine: mapped once, brought into memory, watched for changes; how much memory there is."""
