"""What of the Helm chart is made from elsewhere: schema, table of values, copies of alerts and dashboards."""
