package main

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/quartet-lb/quartet/certs"
)

// defaultCertsDir is where daemons look for certificates.
const defaultCertsDir = "/etc/quartet"

func certsCommand(c *cli) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "certs",
		Short: "Make and show the certificates of managers, nodes and operators",
		Args:  args(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&dir, "dir", defaultCertsDir, "`directory` of the authority and what it issues")

	initCmd := &cobra.Command{
		Use:   "init",
		Short: "Make the fabric's certificate authority: ca.crt and ca.key",
		Args:  args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := certs.Init(dir); err != nil {
				return err
			}
			fmt.Fprintf(c.out, "%s made: give it to every node\n%s made: keep it secret; only issuing needs it\n", filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"))
			return nil
		},
	}
	var hosts []string
	issue := &cobra.Command{
		Use:   "issue ROLE NAME",
		Short: "Issue or renew a certificate and its key",
		Long: `Issue or renew a certificate and its key, <name>.crt and <name>.key.

Roles are ` + strings.Join(certs.Roles, ", ") + `. A node's name is the one it
runs under. Running processes pick a renewed certificate up by themselves.`,
		Example: `  quartet certs issue manager manager1 --host 10.1.4.9
  quartet certs issue mux mux1
  quartet certs issue operator alice`,
		Args:      args(cobra.ExactArgs(2)),
		ValidArgs: certs.Roles,
		RunE: func(_ *cobra.Command, a []string) error {
			if err := certs.Issue(dir, a[0], a[1], hosts); err != nil {
				return err
			}
			cert, err := certs.Read(filepath.Join(dir, a[1]+".crt"))
			if err != nil {
				return err
			}
			fmt.Fprintf(c.out, "%s made for %s %s, valid until %s\n", filepath.Join(dir, a[1]+".crt"), a[0], a[1], cert.NotAfter.UTC().Format(time.DateOnly))
			return nil
		},
	}
	issue.Flags().StringSliceVar(&hosts, "host", nil, "IP `address` or DNS name that clients other than Quartet's may check, such as curl")
	show := &cobra.Command{
		Use:   "show [FILE...]",
		Short: "Show whose certificates are and how long they are valid",
		Args:  args(cobra.ArbitraryArgs),
		RunE: func(_ *cobra.Command, files []string) error {
			if len(files) == 0 {
				var err error
				if files, err = filepath.Glob(filepath.Join(dir, "*.crt")); err != nil {
					return invalid("%s", err)
				}
				if len(files) == 0 {
					return invalid("%s: no certificate in it: make an authority with 'quartet certs init --dir %s'", dir, dir)
				}
			}
			t := &table{}
			t.add("ROLE", "NAME", "VALID UNTIL", "LEFT", "HOSTS", "SHA-256", "FILE")
			for _, file := range files {
				cert, err := certs.Read(file)
				if err != nil {
					return err
				}
				role, name, err := certs.Identity(cert)
				if cert.IsCA {
					role, name = "authority", cert.Subject.CommonName
				} else if err != nil {
					role, name = "", cert.Subject.CommonName
				}
				names := cert.DNSNames
				for _, ip := range cert.IPAddresses {
					names = append(names, ip.String())
				}
				left := "expired"
				if d := time.Until(cert.NotAfter); d > 0 {
					left = fmt.Sprintf("%d days", int(d.Hours()/24))
				}
				sum := sha256.Sum256(cert.Raw)
				t.add(role, name, cert.NotAfter.UTC().Format(time.RFC3339), left, strings.Join(names, ","), hex.EncodeToString(sum[:8]), file)
			}
			return t.print(c.out)
		},
	}
	cmd.AddCommand(initCmd, issue, show)
	return cmd
}
