package lab

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/lab/fabric"
)

const (
	managerPort = 7470
	operator    = "operator"
)

func (l *Lab) certDir() string { return filepath.Join(l.Dir(), "certs") }

func (l *Lab) cert(name string) (ca, cert, key string) {
	return filepath.Join(l.certDir(), "ca.crt"), filepath.Join(l.certDir(), name+".crt"), filepath.Join(l.certDir(), name+".key")
}

// ManagerURL is where the lab's manager listens, for who is inside the lab.
func (l *Lab) ManagerURL() string {
	m, _ := l.Topology.Node("manager")
	return fmt.Sprintf("https://%s:%d", m.Addr4, managerPort)
}

// Environment points the quartet command at the lab's manager with an
// operator's certificate.
func (l *Lab) Environment() []string {
	ca, cert, key := l.cert(operator)
	return []string{
		"QUARTET_MANAGER=" + l.ManagerURL(),
		"QUARTET_CA=" + ca, "QUARTET_CERT=" + cert, "QUARTET_KEY=" + key,
		"PATH=" + l.Binaries + string(os.PathListSeparator) + os.Getenv("PATH"),
	}
}

// Exec runs a command in a node with the caller's standard streams and
// Environment, and returns when it ends.
func (l *Lab) Exec(node string, args []string, wire func(*exec.Cmd)) error {
	net, err := l.Net(node)
	if err != nil {
		return err
	}
	c := fabric.Command{Args: args, Env: append(l.Environment(), "QUARTET_LAB_NODE="+node)}
	if path, err := exec.LookPath(filepath.Join(l.Binaries, args[0])); err == nil && filepath.Base(args[0]) == args[0] {
		c.Args = append([]string{path}, args[1:]...)
	}
	cmd := c.Exec()
	wire(cmd)
	if err := net.StartIn(cmd); err != nil {
		return fmt.Errorf("run %s: %w", args[0], err)
	}
	return cmd.Wait()
}

// client is the manager's API, dialled from the manager's own namespace so
// that it answers whatever becomes of the fabric.
func (l *Lab) client() (quartetv1connect.OperatorServiceClient, error) {
	if l.api != nil {
		return l.api, nil
	}
	tls, err := certs.LoadClient(l.cert(operator))
	if err != nil {
		return nil, err
	}
	at, err := l.Net("manager")
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		TLSClientConfig: tls, ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = at.Do(func() error {
				c, err = (&net.Dialer{Timeout: 2 * time.Second}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		},
	}
	l.api = quartetv1connect.NewOperatorServiceClient(&http.Client{Transport: transport}, l.ManagerURL())
	return l.api, nil
}

// observed are the nodes as the manager sees them, by name.
func (l *Lab) observed(ctx context.Context) (map[string]*quartetv1.NodeStatus, error) {
	all := map[string]*quartetv1.NodeStatus{}
	for _, kind := range []string{"Mux", "Host"} {
		r, err := l.list(ctx, kind)
		if err != nil {
			return all, err
		}
		for _, n := range r.GetNodes() {
			all[n.GetName()] = n
		}
	}
	return all, nil
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
